//! Adoption of clusters that this operator did not create ([ADR 15](../../../../docs/adr/0015-adoption.md)). Either the
//! operator takes over the pods of a cluster of coreos/etcd-operator, or the members of a new EtcdCluster join an
//! existing etcd cluster.
//!
//! The operator records the cluster ID that a quorum of the existing members reports, and never bootstraps such a
//! cluster (invariant 7). Other modules later replace the existing members.

use std::collections::BTreeSet;

use api::cluster::peers_of;
use etcd::{ClusterId, Member, Members};

use crate::plan::actions::Builder;
use crate::plan::view::{Data, MemberState, is_elsewhere, name_of};
use crate::plan::{BLIND, Draft};
use crate::reason::Reason;
use crate::snapshot::{Intent, Observed, Seen};

/// The annotation `join`, as messages name it.
const ANNOTATION: &str = "metadata.annotations[etcd.database.coreos.com/join]";

/// Plans the adoption of a cluster whose pods and volumes all lack a cluster token. `None` if a pod or volume has a
/// token, or if no pod and no volume exists.
///
/// Invariant 7: pods and volumes without a token may belong to a formed cluster, so the operator changes nothing until
/// a quorum has identified that cluster.
pub(super) fn adopt(build: Builder<'_>, recorded: Option<ClusterId>) -> Option<Draft<'_>> {
    let observed = build.observed;
    let mut tokens = observed
        .pods
        .values()
        .map(|pod| &pod.token)
        .chain(observed.disks.values().map(|disk| &disk.token))
        .peekable();
    if tokens.peek().is_none() || tokens.any(Option::is_some) {
        return None;
    }
    let mut draft = Draft::new(build);
    let ours: BTreeSet<&String> = observed.pods.keys().chain(observed.disks.keys()).collect();
    let waits = (Reason::AdoptionWaits, "taken over");
    let Some(list) = answer(recorded, waits, &mut draft) else {
        return Some(draft);
    };
    let names: BTreeSet<String> = list.members.iter().map(name_of).collect();
    let known: BTreeSet<String> = names
        .into_iter()
        .filter(|name| ours.contains(name))
        .collect();
    if known.is_empty() {
        let id = list.cluster_id;
        let text = format!(
            "cluster {id} answers, but none of its members runs in a pod of this EtcdCluster: the operator changes nothing"
        );
        draft.problem(Reason::ForeignCluster, text);
        return Some(draft);
    }
    let said = format!("adopt cluster {} with its members", list.cluster_id);
    record(list, known, said, &mut draft);
    Some(draft)
}

/// Records the existing cluster at the URLs in the annotation `join` of the EtcdCluster; `None` without this
/// annotation.
pub(super) fn join(build: Builder<'_>, recorded: Option<ClusterId>) -> Option<Draft<'_>> {
    let observed = build.observed;
    if observed.join.is_empty() {
        return None;
    }
    if let Some(refusal) = is_not_granted(build) {
        return Some(refusal);
    }
    let mut draft = Draft::new(build);
    let waits = (Reason::JoinWaits, "joined");
    if let Some(list) = answer(recorded, waits, &mut draft) {
        if let Some(refusal) = refuses(build, list) {
            return Some(refusal);
        }
        let said = format!("join cluster {}", list.cluster_id);
        // A joined cluster was created by other software, so the operator records no first members.
        record(list, BTreeSet::new(), said, &mut draft);
    }
    Some(draft)
}

/// Returns a problem if only this EtcdCluster or only the joined cluster uses TLS between members, because their
/// members could not connect to each other. `None` if the TLS settings match, or if the list already contains a member
/// of this EtcdCluster.
pub(super) fn refuses<'a>(build: Builder<'a>, list: &Members) -> Option<Draft<'a>> {
    let observed = build.observed;
    let rollout = observed.tls_rollout.as_ref()?;
    let theirs = |member: &&Member| is_elsewhere(observed, &name_of(member));
    if observed.join.is_empty() || !list.members.iter().all(|member| theirs(&member)) {
        return None;
    }
    let (ours, _) = peers_of(rollout.at.as_ref()).usual();
    let is_tls = |url: &String| url.starts_with("https://");
    let urls = list.members.iter().flat_map(|member| &member.peer_urls);
    let other = urls.clone().find(|url| is_tls(url) != ours)?;
    let says = if ours { "with" } else { "without" };
    let remedy = if urls.clone().any(|url| is_tls(url) == ours) {
        "the members of the other cluster have different TLS settings: first complete the TLS change there"
    } else if rollout.recorded {
        "status.TLS already records these settings: change spec.TLS in the manifest, delete this EtcdCluster (it has \
         no members yet), and create it again with the same annotations"
    } else if ours {
        "remove spec.TLS.static.member.peerSecret or spec.TLS.generated; enable TLS between members after the \
         members of the other cluster are removed"
    } else {
        "set spec.TLS.static.member.peerSecret to a Secret with peer certificates of an authority that both clusters \
         trust"
    };
    let text = format!(
        "a member of cluster {} has the peer URL {other}, but spec.TLS configures peer connections {says} TLS: the operator adds no member, because members with and without TLS cannot connect to each other; {remedy}",
        list.cluster_id
    );
    let mut draft = Draft::new(build);
    draft.problem(Reason::JoinRefused, text);
    draft.requeue = BLIND;
    Some(draft)
}

/// Invariant 28: reports an external member of the joined cluster, or an endpoint in the annotation, that has no grant.
/// The operator then adds, promotes and removes no member. `None` if every grant exists, if this operator bootstrapped
/// the cluster, or if no external member is left.
pub(super) fn is_not_granted(build: Builder<'_>) -> Option<Draft<'_>> {
    let observed = build.observed;
    let intent = observed.intent.as_ref();
    if observed.join.is_empty() || intent.is_some_and(|intent| !intent.members.is_empty()) {
        return None;
    }
    let list = observed.members.known();
    let listed = list.iter().flat_map(|list| &list.members);
    let external = listed.filter(|member| is_elsewhere(observed, &name_of(member)));
    let external: Vec<&Member> = external.collect();
    if list.is_some() && external.is_empty() {
        return None;
    }
    let named = observed.join.iter().map(|url| (ANNOTATION.to_owned(), url));
    let advertised = external.iter().filter_map(|member| {
        let field = format!(
            "the client URL of member {} of the joined cluster",
            name_of(member)
        );
        Some((field, member.client_urls.first()?))
    });
    let refused = named.chain(advertised).find_map(|(field, url)| {
        let why = observed.join_rule.check(url).err()?;
        Some(format!(
            "{field}: {url} {why}; no member is added or removed"
        ))
    })?;
    let mut draft = Draft::new(build);
    draft.problem(Reason::JoinRefused, refused);
    Some(draft)
}

/// Invariant 1: returns the member list if a quorum has answered, and all answers and the status name one cluster ID.
fn answer<'a>(
    recorded: Option<ClusterId>,
    (reason, what): (Reason, &str),
    draft: &mut Draft<'a>,
) -> Option<&'a Members> {
    let observed = draft.build.observed;
    match &observed.members {
        Seen::Unknown(why) => {
            let text = format!(
                "no quorum of the existing cluster has answered yet ({why}): the cluster is {what} when a quorum answers"
            );
            draft.wait(reason, text, BLIND);
            None
        }
        Seen::Known(list) => {
            let mut answers = observed.answers().map(|(_, status)| status.cluster_id);
            let other = answers.find(|id| *id != list.cluster_id);
            let other = other.or(recorded.filter(|id| *id != list.cluster_id));
            if let Some(other) = other {
                let text = format!(
                    "the operator found two clusters, {other} and {}, and changes nothing: delete the objects of the \
                     cluster that does not belong to this EtcdCluster",
                    list.cluster_id
                );
                draft.problem(Reason::IdentityUnknown, text);
                return None;
            }
            Some(list)
        }
    }
}

/// Derives the token from the cluster ID, so that concurrent operator processes record the same token (invariant 11).
pub(super) fn token(observed: &Observed, cluster_id: ClusterId) -> String {
    format!("{}-{cluster_id}", observed.cluster)
}

fn record(list: &Members, members: BTreeSet<String>, said: String, draft: &mut Draft) {
    draft.say(said);
    let intent = Intent {
        token: token(draft.build.observed, list.cluster_id),
        members,
    };
    draft.add(draft.build.record_intent(&intent, Some(list.cluster_id)));
}

/// Waits while no quorum of a joined cluster answers. The operator cannot see whether external members are lost, so no
/// recovery starts, even if a person has approved it (invariant 16: clients never reach two clusters).
pub(super) fn is_joining<'a>(build: Builder<'a>, why: &str) -> Option<Draft<'a>> {
    if build.observed.join.is_empty() {
        return None;
    }
    let text = format!(
        "no quorum of the joined cluster answers ({why}): restore its members; if none of them exists, remove the \
         annotation {}",
        api::names::ANNOTATION_JOIN
    );
    let mut draft = is_not_granted(build).unwrap_or_else(|| Draft::new(build));
    draft.wait(Reason::JoinWaits, text, BLIND);
    Some(draft)
}

/// True while the cluster is being adopted and some of its pods have no token yet. While it is true, the client Service
/// stays unchanged and routes to all pods.
pub(super) fn is_under_way(observed: &Observed) -> bool {
    let unmarked = observed
        .pods
        .values()
        .any(|pod| pod.owned && pod.token.is_none() && pod.stays());
    observed.cluster_id.is_some() && unmarked
}

/// True for an external member of the joined cluster: a member of this EtcdCluster will replace it.
pub(super) fn is_replaced(observed: &Observed, member: &MemberState) -> bool {
    !observed.join.is_empty() && member.data == Data::Elsewhere && member.joined()
}
