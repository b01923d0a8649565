"""How often an address may fail to sign in before its failures are no longer answered in full, or written down."""

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address, ip_network

BURST = 60
REFILL_S = 1.0
MAX_PEERS = 1024


class FailureLimit:
    """A token bucket for each peer address, of the latest MAX_PEERS; only failures ever take from it."""

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, peer: str | None, now_s: float) -> bool:
        """Count one failure; False when this address has had too many.

        Args:
            peer: IP address; of IPv6 the network of 64 bits counts, as one host owns all of it.
            now_s: seconds of a clock that nobody can set.
        """
        key = _group(peer)
        level, since = self._levels.pop(key, (float(BURST), now_s))
        level = min(float(BURST), level + (now_s - since) / REFILL_S)
        enough = level >= 1
        self._levels[key] = (level - 1 if enough else level, now_s)
        if len(self._levels) > MAX_PEERS:
            self._levels.popitem(last=False)
        return enough


def _group(peer: str | None) -> str:
    try:
        address = ip_address(peer or "")
    except ValueError:
        return ""
    if isinstance(address, IPv6Address):
        return str(ip_network((address, 64), strict=False))
    return str(address)
