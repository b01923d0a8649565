"""The daemon's own log: one line a message, without secrets and without control characters."""

import logging
import re
import sys

from server.domain.redaction import Redactor

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class LineFormatter(logging.Formatter):
    """Formats records so that what was sent can neither forge a line, nor steer a terminal, nor show a secret."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._redactor = redactor

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name logging gives it
        """The line of a record; a traceback follows it on lines of its own."""
        record.message = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return self._redactor.text(super().format(record))


def set_up_logging(redactor: Redactor) -> None:
    """Log to standard error, this way from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(redactor))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
