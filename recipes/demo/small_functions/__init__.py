"""Small Python functions put together from parts, with examples that were found by running them.

A function takes elements from somewhere (a list, the digits of a number, the words of a sentence), keeps those that
satisfy a condition, changes each, and reduces them to a result: "the sum of the squares of the even numbers in a list".
Names, wording, hints and the way the body is written vary.
"""
