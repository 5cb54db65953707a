"""A machine behind a router with NAT, and one on the other side, which has addresses of the whole internet."""

from __future__ import annotations

import subprocess

from examples.benchmarks.network import Network, NoNetwork

INSIDE, ROUTER, OUTSIDE = "192.168.7.2", "9.9.0.1", "9.9.0.2"
_NAT = "table ip nat {{ chain post {{ type nat hook postrouting priority 100; oifname {wan} masquerade; }}; }}"


class Routed(Network):
    """The machines "outside" and "router" on a switch, and "inside" behind the router."""

    def __init__(self) -> None:
        super().__init__()
        try:
            for name, address in (("outside", OUTSIDE), ("router", ROUTER)):
                self.at(name, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self.machine("inside")  # on the switch, until its link is replaced by one to the router
            self._link_inside()
            self.at("router", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            self.at("router", "nft", _NAT.format(wan="eth0"))
        except NoNetwork:
            self.close()
            raise

    def _link_inside(self) -> None:
        space = self.machine("inside")[-1]
        self.at("inside", "ip", "link", "del", "eth0")
        self.at("router", "ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", space)
        self.at("router", "ip", "addr", "add", "192.168.7.1/24", "dev", "lan")
        self.at("router", "ip", "link", "set", "lan", "up")
        self.at("inside", "ip", "addr", "add", f"{INSIDE}/24", "dev", "eth0")
        self.at("inside", "ip", "link", "set", "eth0", "up")
        self.at("inside", "ip", "route", "add", "default", "via", "192.168.7.1")

    def at(self, name: str, *command: str) -> None:
        """Run a command on a machine. Raises NoNetwork if it fails."""
        done = subprocess.run([*self.machine(name), *command], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")

    def drop(self, name: str, hook: str, match: str) -> None:
        """Let a machine drop the packets that match, in silence."""
        chain = f"table ip drops {{ chain one {{ type filter hook {hook} priority 0; {match} drop; }}; }}"
        self.at(name, "nft", chain)

    def drop_no_more(self, name: str) -> None:
        """Undo `drop`."""
        self.at(name, "nft", "delete table ip drops")

    def narrow(self, mtu: int) -> None:
        """Let only packets of `mtu` bytes at most leave the router, and tell no machine of it."""
        self.at("router", "ip", "link", "set", "eth0", "mtu", str(mtu))
        self.drop("router", "output", "ip protocol icmp")
