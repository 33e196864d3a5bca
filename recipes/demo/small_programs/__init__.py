"""Small programs written for the demo model: tasks, checked solutions, and conversations made from them."""

from recipes.demo.small_programs.conversations import chat_examples
from recipes.demo.small_programs.program import Program, programs

__all__ = ["Program", "chat_examples", "programs"]
