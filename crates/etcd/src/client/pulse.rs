//! Reads health data from a member's listener for health and metrics (`--listen-metrics-urls`), over plain HTTP without
//! credentials.
//!
//! etcd opens this listener at its start, but opens the client listener only after the member has joined the cluster.

use std::collections::BTreeSet;
use std::time::Duration;

use super::plain;
use crate::limits::MAX_MEMBERS;
use crate::port::{Error, MemberId, Pulse};

/// [`pulse`] parses the lines that begin with these texts.
const SERVER_ID: &str = "etcd_server_id{server_id=\"";
const ACTIVE_PEER: &str = "etcd_network_active_peers{Local=\"";
const HAS_LEADER: &str = "etcd_server_has_leader";
const APPLIED: &str = "etcd_server_proposals_applied_total";

/// Requests the metrics of a member. `deadline` includes the time for the connection.
pub(super) async fn ask(address: &str, deadline: Duration) -> Result<Pulse, Error> {
    let lines = [SERVER_ID, ACTIVE_PEER, HAS_LEADER, APPLIED];
    let answer = plain::fetch_lines(address, "/metrics", &lines, deadline).await?;
    pulse(&answer).ok_or_else(|| {
        Error::Other(format!(
            "{address}: the response does not contain the metrics of an etcd member: check the address"
        ))
    })
}

/// Parses a response. `None` if a value is missing.
fn pulse(answer: &str) -> Option<Pulse> {
    let (200, body) = plain::parts(answer)? else {
        return None;
    };
    // The last line may be incomplete, so only lines with a line break are parsed.
    let lines = || {
        body.split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n'))
    };
    let value = |name: &str| plain::metric(body, name);
    // The value is compared with `>=`, because the metric of active peers counts connections. For example, etcd 3.7.3
    // reports 2 for a member that received the leader's snapshot.
    let named = |rest: &str| {
        let (id, value) = rest.split_once("\"} ")?;
        let holds = value.trim().parse::<f64>().ok()? >= 1.0;
        let id = u64::from_str_radix(id, 16).ok()?;
        holds.then_some(MemberId(id))
    };
    let mut ids = lines()
        .filter_map(|line| line.strip_prefix(SERVER_ID))
        .filter_map(named);
    let (member_id, None) = (ids.next()?, ids.next()) else {
        return None;
    };
    let peers = lines().filter_map(|line| {
        let labels = line.strip_prefix(ACTIVE_PEER)?;
        let (local, remote) = labels.split_once("\",Remote=\"")?;
        let local = u64::from_str_radix(local, 16).ok()?;
        named(remote).filter(|_| MemberId(local) == member_id)
    });
    let peers: BTreeSet<_> = peers.take(MAX_MEMBERS + 1).collect();
    if peers.len() > MAX_MEMBERS {
        return None;
    }
    Some(Pulse {
        member_id,
        has_leader: value(HAS_LEADER)? >= 1.0,
        raft_applied_index: whole(value(APPLIED)?)?,
        peers,
    })
}

/// Converts a metric to an integer. Metrics are floats, which are exact up to 2^53. `None` for a negative value or NaN.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // `contains` excludes values that do not fit into `u64`.
fn whole(value: f64) -> Option<u64> {
    (0.0..9.0e15).contains(&value).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n\
        etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"91bc3c398fb3c146\"} 1\n\
        etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"2\"} 0\n\
        # TYPE etcd_server_has_leader gauge\netcd_server_has_leader 1\n\
        etcd_server_id{server_id=\"8e9e05c52164694d\"} 1\n\
        etcd_server_proposals_applied_total 1.234567e+06\n\
        etcd_server_proposals_pending 0\n";

    #[test]
    fn member_leader_and_applied_index_are_parsed_from_metrics() {
        let expected = Pulse {
            member_id: MemberId(0x8e9e_05c5_2164_694d),
            has_leader: true,
            raft_applied_index: 1_234_567,
            peers: [MemberId(0x91bc_3c39_8fb3_c146)].into(),
        };
        assert_eq!(pulse(METRICS), Some(expected));
        let alone = METRICS.replace("has_leader 1", "has_leader 0");
        assert!(!pulse(&alone).unwrap().has_leader);
        let twice = METRICS.replace("c146\"} 1", "c146\"} 2");
        assert_eq!(pulse(&twice), pulse(METRICS));
        let lost = METRICS.replace("c146\"} 1", "c146\"} 0");
        assert_eq!(pulse(&lost).unwrap().peers, BTreeSet::new());
    }

    #[test]
    fn number_of_peers_in_metrics_of_hostile_etcd_is_limited() {
        let with = |count: usize| {
            let peer = |id| {
                format!(
                    "etcd_network_active_peers{{Local=\"8e9e05c52164694d\",Remote=\"{id:x}\"}} 1\n"
                )
            };
            let peers: String = (1..count).map(peer).collect();
            pulse(&format!("{METRICS}{peers}"))
        };
        assert_eq!(with(MAX_MEMBERS).unwrap().peers.len(), MAX_MEMBERS);
        assert_eq!(with(MAX_MEMBERS + 1), None);
    }

    #[test]
    fn partial_metrics_and_metrics_not_from_etcd_are_rejected() {
        let second = "etcd_server_id{server_id=\"1\"} 1\n";
        for answer in [
            String::new(),
            METRICS.replace("200 OK", "404 Not Found"),
            METRICS.replace("HTTP/1.0", "SSH-2.0"),
            METRICS.replace("etcd_server_id", "other_id"),
            METRICS.replace("etcd_server_has_leader 1", "etcd_server_has_leader"),
            METRICS.replace("1.234567e+06", "-1"),
            METRICS.replace("1.234567e+06", "NaN"),
            format!("{METRICS}{second}"),
            METRICS.split("567e+06").next().unwrap().to_owned(),
        ] {
            assert_eq!(pulse(&answer), None, "{answer}");
        }
    }
}
