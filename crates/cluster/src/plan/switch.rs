//! Switches TLS on or off while members run. A switch between members has several stages ([`PeerStage`]), and each
//! stage needs a rolling update.
//!
//! Invariant 23: every member listens at its listed peer URL, and the other members can connect to that URL. The next
//! stage starts only if all members run the current or the next stage, and if every peer URL in etcd's list names a
//! listener that exists in both stages. The operator records the next stage in `status.TLS` before the first member
//! starts with it.

use api::cluster::{PeerListener, PeerStage, TlsPolicy, TlsStatus, peers_of};

use crate::plan::actions::{self, Builder};
use crate::plan::change::decide;
use crate::plan::conflicts::Earlier;
use crate::plan::view::{Data, MemberState, View};
use crate::plan::{BLIND, Draft, SHORTLY, joining};
use crate::reason::Reason;
use crate::snapshot::{Intent, Kept, Observed};
use crate::switch::{TlsMode, TlsRollout};

/// Records the TLS settings with which members start from now on, and takes the next step of a TLS switch.
pub(super) fn settle<'a>(
    build: Builder<'a>,
    intent: &Intent,
    view: &View,
    earlier: &Earlier,
) -> Draft<'a> {
    let mut draft = Draft::new(build);
    if let Some(rollout) = &build.observed.tls_rollout {
        step(rollout, intent, view, earlier, &mut draft);
    }
    draft
}

fn step(rollout: &TlsRollout, intent: &Intent, view: &View, earlier: &Earlier, draft: &mut Draft) {
    if !rollout.recorded {
        record(intent, rollout.at.as_ref(), draft);
        return;
    }
    if let Some(text) = rollout.under_way() {
        draft.wait(Reason::TLSSwitching, text, BLIND);
    }
    if !earlier.changes_members && correct_peer_url(rollout, view, draft) {
        return;
    }
    let Some(next) = &rollout.next else {
        return;
    };
    if !next.faults.is_empty() {
        for fault in &next.faults {
            draft.problem(fault.code.into(), fault.message.clone());
        }
        return;
    }
    if let Some(why) = unsettled(draft.build.observed, rollout, view) {
        let text = format!("the next stage of the TLS change starts when {why}");
        draft.wait(Reason::TLSSwitching, text, SHORTLY);
        return;
    }
    // Invariant 2: if another phase already changes members in this plan, the TLS stage changes in a later plan.
    if earlier.changes_members {
        return;
    }
    let (here, there) = (peers_of(rollout.at.as_ref()), peers_of(next.to.as_ref()));
    if let Some(listener) = here.shared_with(there).filter(|_| here != there) {
        let other = |listed| listed != Some(listener);
        if redirect(view, |member| names_any(member, other), listener, draft) {
            return;
        }
    }
    let words = TlsMode::of(next.to.as_ref()).words();
    draft.say(format!("restart members so that they {words}"));
    record(intent, next.to.as_ref(), draft);
}

fn record(intent: &Intent, policy: Option<&TlsPolicy>, draft: &mut Draft) {
    let record = TlsStatus::new(&intent.token, policy);
    draft.add(draft.build.record_tls(&record));
}

/// What the next stage waits for; `None` if it may start.
fn unsettled(observed: &Observed, rollout: &TlsRollout, view: &View) -> Option<String> {
    let next = rollout.next.as_ref()?;
    let modes = [
        TlsMode::of(rollout.at.as_ref()),
        TlsMode::of(next.to.as_ref()),
    ];
    // The headless Service must first have the peer ports of this stage, because members connect through this Service.
    if observed.shared.headless == Kept::Drifted {
        return Some("the headless Service is repaired".to_owned());
    }
    view.members.iter().find_map(|member| {
        let name = &member.name;
        if member.data == Data::Elsewhere {
            return Some(format!("the external member {name} is removed"));
        }
        if !modes
            .iter()
            .any(|mode| rollout.modes.get(name) == Some(mode))
        {
            return Some(format!("{name} is restarted"));
        }
        if !serves(member) {
            return Some(format!("{name} serves"));
        }
        // The TLS change waits, because the status of a learner without a connection to the leader is stale.
        if joining::is_cut_off(member, observed) {
            return Some(format!("{name} is connected to the leader"));
        }
        let service = member.service.filter(|service| !service.drifted);
        service
            .is_none()
            .then(|| format!("the Service of {name} is repaired"))
    })
}

fn serves(member: &MemberState) -> bool {
    let ready = member.pod.is_some_and(|pod| pod.ready && pod.stays());
    ready && member.is_healthy()
}

/// Repairs a violation of invariant 23: if the peer URL of a serving member names a listener that the member does not
/// have, sets the URL of a listener that the member has. The violation happens to the seed of a recovery if its pod is
/// lost before its TLS settings are recorded, and the spec changes after that.
fn correct_peer_url(rollout: &TlsRollout, view: &View, draft: &mut Draft) -> bool {
    let mode = TlsMode::of(rollout.at.as_ref());
    let here = peers_of(rollout.at.as_ref());
    let stages = PeerStage::ALL.iter();
    let others: Vec<PeerListener> = stages
        .flat_map(|stage| stage.listeners())
        .filter(|listener| !here.listeners().contains(listener))
        .copied()
        .collect();
    let is_astray = |member: &MemberState| {
        let runs = rollout.modes.get(&member.name) == Some(&mode) && serves(member);
        runs && names_any(member, |listed| {
            listed.is_some_and(|it| others.contains(&it))
        })
    };
    redirect(view, is_astray, here.usual(), draft)
}

/// True if one of the member's peer URLs names a listener for which `such` returns true.
fn names_any(member: &MemberState, such: impl Fn(Option<PeerListener>) -> bool) -> bool {
    let mut urls = member.listed.peer_urls.iter();
    urls.any(|url| such(listener_of(url)))
}

/// Finds the first member for which `such` returns true, and changes its peer URLs so that they name this listener.
/// Returns false if there is no such member.
fn redirect(
    view: &View,
    such: impl Fn(&MemberState) -> bool,
    listener: PeerListener,
    draft: &mut Draft,
) -> bool {
    let Some(member) = view.members.iter().find(|member| such(member)) else {
        return false;
    };
    let urls = member.listed.peer_urls.iter();
    let mut urls: Vec<String> = urls.filter_map(|url| at_listener(url, listener)).collect();
    urls.dedup();
    let (name, joined) = (&member.name, urls.join(", "));
    let said = format!("set the peer URLs of {name} to {joined}");
    let text = format!("the peer URLs of {name} are being changed");
    let update = actions::update_peer_urls(name, member.id(), urls);
    draft.wait(Reason::TLSSwitching, text, SHORTLY);
    decide(view, vec![update], None, said, draft)
}

fn parts(url: &str) -> Option<(bool, &str, u16)> {
    let (scheme, rest) = url.split_once("://")?;
    let (host, port) = rest.trim_end_matches('/').rsplit_once(':')?;
    Some((scheme == "https", host, port.parse().ok()?))
}

/// The listener that a peer URL names; `None` if the URL cannot be parsed.
fn listener_of(url: &str) -> Option<PeerListener> {
    parts(url).map(|(tls, _, port)| (tls, port))
}

/// The URL with the same host, and with the scheme and the port of the given peer listener.
fn at_listener(url: &str, (tls, port): PeerListener) -> Option<String> {
    let (_, host, _) = parts(url)?;
    let scheme = if tls { "https" } else { "http" };
    Some(format!("{scheme}://{host}:{port}"))
}

/// True if a member at this stage listens at this URL.
#[cfg(test)]
pub(super) fn listens(stage: PeerStage, url: &str) -> bool {
    listener_of(url).is_some_and(|listener| stage.listeners().contains(&listener))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members that another operator started can have IP addresses in their peer URLs.
    #[test]
    fn changed_peer_url_keeps_host_name_or_ip_address() {
        for (url, expected) in [
            ("http://db-a.ns.svc:2380", Some("https://db-a.ns.svc:2382")),
            ("http://10.0.0.7:2380/", Some("https://10.0.0.7:2382")),
            ("http://[fd00::7]:2380", Some("https://[fd00::7]:2382")),
            ("http://[fd00::7]", None),
        ] {
            assert_eq!(at_listener(url, (true, 2382)).as_deref(), expected, "{url}");
        }
    }
}
