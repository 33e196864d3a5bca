"""The page at `/`: is the service well, does speculation pay, and a chat to try it."""

from fledge.server.dashboard.router import router

__all__ = ["router"]
