"""Following a job over a link that breaks: ask again from where the last answer ended.

stream of events   GET /jobs/{id}/events/stream, Last-Event-ID    one event after the other, each once
log                GET /jobs/{id}/log?offset=&wait=               byte for byte, over all attempts
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from client.errors import ApiError, Unreachable

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class ServerSentEvent(NamedTuple):
    """One event of a stream; `id` is the last one that was sent, `event` is empty for an ordinary one."""

    id: str
    event: str
    data: str


def worth_repeating(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment: no answer came, or the daemon or a proxy is not up."""
    if isinstance(error, ApiError):
        in_flight = str(error.problem.get("type")).endswith(":request-in-flight")
        return in_flight or error.status in (429, 502, 503, 504)
    return isinstance(error, Unreachable)


def again(ask: Callable[[], T], patience_s: float, between: Callable[[BaseException], None]) -> T:
    """The answer to a request that may be sent any number of times.

    Args:
        ask: sends it.
        patience_s: seconds after which its last error is raised.
        between: called before each repetition with the error it is for.
    """

    def before(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        assert error is not None
        between(error)

    retrying = Retrying(
        retry=retry_if_exception(worth_repeating),
        wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
        stop=stop_after_delay(patience_s),
        before_sleep=before,
        reraise=True,
    )
    return retrying(ask)


def parse_stream(pieces: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """The events of a text/event-stream, however it was cut into pieces; an unfinished one at its end is left out.

    Source: WHATWG HTML, section 9.2.6; of its line ends only those the daemon sends.
    """
    last_id, event, data = "", "", list[str]()
    for line in _lines(pieces):
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                data.append(value)
            elif name == "event":
                event = value
            elif name == "id":
                last_id = value
            continue
        if data:
            yield ServerSentEvent(last_id, event, "\n".join(data))
        event, data = "", []


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    rest: list[bytes] = []
    for piece in pieces:
        *whole, last = piece.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line]).decode()
            rest = []
        rest.append(last)
