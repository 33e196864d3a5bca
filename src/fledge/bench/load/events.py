"""Server-sent events out of bytes that were cut anywhere."""

MAX_EVENT_BYTES = 16 * 2**20


class EventParser:
    """Fed with bytes as they come, returns the `data` of each event that is complete.

    Knows the three line ends, comments, fields other than data, several data lines in an event, a byte order mark.
    Raises ValueError for an event that never ends.
    """

    def __init__(self) -> None:
        self._buffer = b""  # the beginning of a line
        self._lines: list[bytes] = []  # of the event under way
        self._after_return = False  # a line feed that comes next belongs to the carriage return before it
        self._at_start = True

    def feed(self, data: bytes) -> list[str]:
        if self._after_return and data:
            data = data.removeprefix(b"\n")
            self._after_return = False
        self._buffer += data
        if self._at_start:
            if len(self._buffer) < 3 and b"\xef\xbb\xbf".startswith(self._buffer):
                return []
            self._buffer = self._buffer.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        lines = self._buffer.splitlines(keepends=True)
        unfinished = bool(lines) and not lines[-1].endswith((b"\n", b"\r"))
        self._buffer = lines.pop() if unfinished else b""
        if lines and not unfinished:
            self._after_return = lines[-1].endswith(b"\r")
        events = []
        for line in lines:
            event = self._take(line.rstrip(b"\r\n"))
            if event is not None:
                events.append(event)
        if len(self._buffer) + sum(map(len, self._lines)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def close(self) -> list[str]:
        """Return the last event, if the stream ended without the empty line after it."""
        self._take(self._buffer)
        self._buffer = b""
        event = self._take(b"")
        return [] if event is None else [event]

    def _take(self, line: bytes) -> str | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._lines.append(value.removeprefix(b" "))
            return None
        if not self._lines:
            return None
        event = b"\n".join(self._lines).decode("utf-8", errors="replace")
        self._lines = []
        return event
