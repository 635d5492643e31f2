//! Compares the data of all voters.

use std::time::Duration;

use crate::plan::view::{MemberState, View};
use crate::plan::{BLIND, Draft, SHORTLY, SOON, versions};
use crate::reason::Reason;
use crate::snapshot::{Observed, Seen};

/// True if the hashes of all voters at one revision are equal. Callers check all other conditions of their change
/// first, because each member reads its whole database for its hash.
pub(super) fn holds_the_same(view: &View, draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
    if view.voters().count() < 2 {
        return true;
    }
    let wait = |text: String, delay: Duration, draft: &mut Draft| {
        draft.wait(Reason::ComparingData, text, delay);
        false
    };
    if observed.hashes.is_empty() {
        let revision = |member: &MemberState| Some(observed.answer(&member.name)?.revision);
        draft.asks = view.voters().filter_map(revision).min();
        return wait(
            "the data of the members is being compared".to_owned(),
            SOON,
            draft,
        );
    }
    let mut hashes = Vec::new();
    for member in view.voters() {
        match observed.hashes.get(&member.name) {
            Some(Seen::Known(Some(hash))) => hashes.push((member, hash)),
            Some(Seen::Known(None)) | None => {
                let text = format!(
                    "{} has already compacted the revision of the comparison; the operator compares a later revision",
                    member.name
                );
                return wait(text, SHORTLY, draft);
            }
            Some(Seen::Unknown(why)) => {
                let text = format!(
                    "{} does not return the hash of its data: {why}",
                    member.name
                );
                return wait(text, BLIND, draft);
            }
        }
    }
    for (member, hash) in &hashes {
        let generation = compacts_like(observed, member);
        let twins = hashes.iter().filter(|(other, twin)| {
            twin.compacted == hash.compacted && compacts_like(observed, other) == generation
        });
        if let Some((other, _)) = twins.into_iter().find(|(_, twin)| twin.hash != hash.hash) {
            let text = format!(
                "{} and {} have different data at the same revision: the operator changes no member. Find out which member has the correct data, and delete the pod and the PersistentVolumeClaim of the other member: the operator then replaces the other member",
                member.name, other.name
            );
            draft.problem(Reason::DataDiffers, text);
            return false;
        }
    }
    let first = hashes.first().map(|(_, hash)| hash.compacted);
    if hashes.iter().any(|(_, hash)| Some(hash.compacted) != first) {
        return wait(
            "the operator compares the data when all members have finished their compaction"
                .to_owned(),
            SHORTLY,
            draft,
        );
    }
    true
}

/// True if a compaction keeps the tombstone of a key that was deleted at the compacted revision. Releases before 3.4.34
/// and 3.5.16 drop it (etcd pull requests 18274 and 18475), so the hashes of older and newer releases may differ
/// without a loss of data.
fn compacts_like(observed: &Observed, member: &MemberState) -> bool {
    let version = member
        .pod
        .and_then(|pod| versions::runs(observed, &member.name, pod));
    version.is_some_and(|version| {
        let patch = version.semver().patch;
        match version.minor() {
            (3, 4) => patch >= 34,
            (3, 5) => patch >= 16,
            minor => minor > (3, 5),
        }
    })
}
