//! The IP addresses of a testbed: networks for pods, for Services, and for the link between the testbed and the host.
//! All are in the IP family of the testbed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The slot number of a testbed. Each testbed on the machine has a different slot, and therefore different IP
/// addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slot(pub(crate) u8);

impl Slot {
    /// An IP address in the pod network, which is `10.88.0.0/16` for slot 0.
    fn pods(self, third: u8, fourth: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 88 + self.0, third, fourth)
    }

    /// An IP address in the Service network, which is `10.104.0.0/16` for slot 0.
    fn services(self, fourth: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 104 + self.0, 0, fourth)
    }

    /// The IP addresses of the link between the testbed and the host: first the host, then the testbed.
    fn uplink(self) -> (Ipv4Addr, Ipv4Addr) {
        (
            Ipv4Addr::new(10, 120, self.0, 1),
            Ipv4Addr::new(10, 120, self.0, 2),
        )
    }

    /// The name of the host's network interface to the testbed.
    pub(crate) fn interface(self) -> String {
        format!("etb{}", self.0)
    }

    /// The networks of this slot, each with its prefix length: pods, Services, link.
    pub(crate) fn networks(self) -> [(Ipv4Addr, u8); 3] {
        [
            (self.pods(0, 0), 16),
            (self.services(0), 16),
            (Ipv4Addr::new(10, 120, self.0, 0), 30),
        ]
    }
}

/// The IP family of a testbed. Pods and Services have IP addresses of this family only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IpFamily {
    #[default]
    Ipv4,
    Ipv6,
}

impl IpFamily {
    /// The name of the family in Kubernetes objects.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        }
    }

    /// The sysctl that makes the packet filter process the packets between ports of a bridge. It exists only if the
    /// kernel module `br_netfilter` is loaded.
    pub(crate) fn bridge_filter(self) -> &'static str {
        match self {
            Self::Ipv4 => "/proc/sys/net/bridge/bridge-nf-call-iptables",
            Self::Ipv6 => "/proc/sys/net/bridge/bridge-nf-call-ip6tables",
        }
    }
}

/// The first two groups of the IPv6 addresses of all testbeds, in the range of unique local addresses (RFC 4193). The
/// third group is the slot number.
const PREFIX: [u16; 2] = [0xfd65, 0x7462];

/// The IP addresses of one testbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) slot: Slot,
    pub(crate) family: IpFamily,
}

/// A network of a testbed. The value is the fourth group of its IPv6 addresses.
#[derive(Clone, Copy)]
enum Network {
    Link = 0,
    Pods = 1,
    Services = 2,
    /// The network of the nodes, for IPv6 only. With IPv4, nodes have IP addresses in the pod network. With IPv6, the
    /// CNI plugin `bridge` rejects a second IP address of the pod network on the bridge.
    Nodes = 3,
}

impl Addresses {
    fn ipv6(self, network: Network, seventh: u8, last: u8) -> IpAddr {
        let [first, second] = PREFIX;
        let slot = u16::from(self.slot.0);
        Ipv6Addr::new(
            first,
            second,
            slot,
            network as u16,
            0,
            0,
            u16::from(seventh),
            u16::from(last),
        )
        .into()
    }

    fn pods(self, seventh: u8, last: u8) -> IpAddr {
        match self.family {
            IpFamily::Ipv4 => self.slot.pods(seventh, last).into(),
            IpFamily::Ipv6 => self.ipv6(Network::Pods, seventh, last),
        }
    }

    /// The IP address of the bridge that connects the pods. The API server, DNS and object stores listen on it.
    pub(crate) fn gateway(self) -> IpAddr {
        self.pods(0, 1)
    }

    /// The IP address of the bridge in the form for URLs.
    pub(crate) fn gateway_host(self) -> String {
        match self.gateway() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        }
    }

    /// The IP address of a node.
    pub(crate) fn node(self, index: u8) -> IpAddr {
        match self.family {
            IpFamily::Ipv4 => self.pods(0, 10 + index),
            IpFamily::Ipv6 => self.ipv6(Network::Nodes, 0, 10 + index),
        }
    }

    /// The first IP address for pods.
    pub(crate) fn first_pod(self) -> IpAddr {
        self.pods(1, 0)
    }

    /// An IP address in the Service network.
    pub(crate) fn service(self, last: u8) -> IpAddr {
        match self.family {
            IpFamily::Ipv4 => self.slot.services(last).into(),
            IpFamily::Ipv6 => self.ipv6(Network::Services, 0, last),
        }
    }

    /// The IP addresses of the link between the testbed and the host: first the host, then the testbed.
    pub(crate) fn uplink(self) -> (IpAddr, IpAddr) {
        match self.family {
            IpFamily::Ipv4 => {
                let (near, far) = self.slot.uplink();
                (near.into(), far.into())
            }
            IpFamily::Ipv6 => (
                self.ipv6(Network::Link, 0, 1),
                self.ipv6(Network::Link, 0, 2),
            ),
        }
    }

    /// The prefix length of the link network.
    pub(crate) fn uplink_length(self) -> u8 {
        match self.family {
            IpFamily::Ipv4 => 30,
            IpFamily::Ipv6 => 64,
        }
    }

    /// The prefix length of the pod network.
    pub(crate) fn pods_length(self) -> u8 {
        match self.family {
            IpFamily::Ipv4 => 16,
            IpFamily::Ipv6 => 64,
        }
    }

    /// The prefix length of a network with one IP address: 32 or 128.
    pub(crate) fn full_length(self) -> u8 {
        match self.family {
            IpFamily::Ipv4 => 32,
            IpFamily::Ipv6 => 128,
        }
    }

    /// The pod network.
    pub(crate) fn pods_network(self) -> String {
        format!("{}/{}", self.pods(0, 0), self.pods_length())
    }

    /// The Service network. For IPv6, the API server accepts only a network of at most 2^20 addresses.
    pub(crate) fn services_network(self) -> String {
        let length = match self.family {
            IpFamily::Ipv4 => 16,
            IpFamily::Ipv6 => 112,
        };
        format!("{}/{length}", self.service(0))
    }

    /// The networks that the host reaches through the link.
    pub(crate) fn routed(self) -> Vec<String> {
        let mut all = vec![self.pods_network(), self.services_network()];
        if self.family == IpFamily::Ipv6 {
            all.push(format!("{}/64", self.ipv6(Network::Nodes, 0, 0)));
        }
        all
    }

    /// The network that contains every IP address of the family.
    pub(crate) fn everything(self) -> &'static str {
        match self.family {
            IpFamily::Ipv4 => "0.0.0.0/0",
            IpFamily::Ipv6 => "::/0",
        }
    }

    /// A server that listens on this IP address accepts connections to all IP addresses of the family.
    pub(crate) fn unspecified(self) -> IpAddr {
        match self.family {
            IpFamily::Ipv4 => Ipv4Addr::UNSPECIFIED.into(),
            IpFamily::Ipv6 => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// The URL of a server that listens on the bridge.
    pub(crate) fn url(self, scheme: &str, port: u16) -> String {
        format!("{scheme}://{}", SocketAddr::new(self.gateway(), port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IPV4: Addresses = Addresses {
        slot: Slot(2),
        family: IpFamily::Ipv4,
    };
    const IPV6: Addresses = Addresses {
        slot: Slot(2),
        family: IpFamily::Ipv6,
    };

    #[test]
    fn testbed_networks_depend_on_slot_and_ip_family() {
        for (addresses, pods, services) in [
            (IPV4, "10.90.0.0/16", "10.106.0.0/16"),
            (IPV6, "fd65:7462:2:1::/64", "fd65:7462:2:2::/112"),
        ] {
            assert_eq!(addresses.pods_network(), pods);
            assert_eq!(addresses.services_network(), services);
        }
        assert_eq!(IPV4.first_pod().to_string(), "10.90.1.0");
        assert_eq!(IPV6.first_pod().to_string(), "fd65:7462:2:1::1:0");
        assert_eq!(IPV6.service(10).to_string(), "fd65:7462:2:2::a");
    }

    #[test]
    fn urls_have_brackets_around_ipv6_addresses() {
        assert_eq!(IPV4.url("http", 1), "http://10.90.0.1:1");
        assert_eq!(IPV6.url("http", 1), "http://[fd65:7462:2:1::1]:1");
        assert_eq!(IPV6.gateway_host(), "[fd65:7462:2:1::1]");
    }

    #[test]
    fn testbed_addresses_are_distinct() {
        for addresses in [IPV4, IPV6] {
            let mut all = vec![addresses.gateway(), addresses.first_pod()];
            all.extend((0..9).map(|index| addresses.node(index)));
            all.extend([
                addresses.uplink().0,
                addresses.uplink().1,
                addresses.service(1),
            ]);
            let count = all.len();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), count);
        }
    }
}
