"""Small programs written for the demo model: tasks, checked solutions, and conversations made from them."""

from .conversations import PROGRAMS, chat_examples
from .program import Program

__all__ = ["PROGRAMS", "Program", "chat_examples"]
