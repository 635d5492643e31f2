//! The members' volumes. A volume grows in place. For a smaller size or another StorageClass, a new member with a new
//! volume replaces the old member: one member at a time, and never below the quorum (invariants 2 and 3).

use crate::plan::actions::{self, Builder};
use crate::plan::view::{Data, Fate, MemberState, View};
use crate::plan::{Draft, STEADY};
use crate::quantity::in_words;
use crate::reason::Reason;
use crate::snapshot::{Claim, Desired, Disk};

/// Why the volume of a member cannot be changed to match the spec; `None` if it can, or if it matches already.
pub(super) fn unfit(desired: &Desired, member: &MemberState) -> Option<String> {
    let wanted = desired
        .claim
        .as_ref()
        .filter(|_| member.data == Data::There)?;
    match (member.disk, member.pod) {
        (Some(disk), _) => unfit_claim(&disk.claim, wanted),
        (None, Some(pod)) if !pod.durable => {
            Some("the member has no volume, but the spec requests one".to_owned())
        }
        (None, _) => None,
    }
}

/// Why a PVC cannot be changed to match the spec; `None` if it can, or if it matches already.
pub(super) fn unfit_claim(has: &Claim, wanted: &Claim) -> Option<String> {
    // If the spec sets no StorageClass, any class of the PVC is accepted: Kubernetes chose the default class when the
    // PVC was created, and the default may have changed since.
    if let Some(class) = &wanted.class
        && has.class.as_ref() != Some(class)
    {
        let other = has.class.as_deref().unwrap_or_default();
        return Some(format!(
            "the volume of the member has the storage class {other:?}, but the spec sets {class:?}"
        ));
    }
    let (has, wanted) = (has.requested?, wanted.requested?);
    (has > wanted).then(|| {
        format!(
            "the volume of the member has {}, more than the {} in the spec",
            in_words(has),
            in_words(wanted)
        )
    })
}

/// Requests larger volumes, and reports volumes that are growing.
pub(super) fn grow<'a>(build: Builder<'a>, view: &View) -> Draft<'a> {
    let mut draft = Draft::new(build);
    let Some(wanted) = &build.desired.claim else {
        return draft;
    };
    let disks = view
        .members
        .iter()
        .filter_map(|member| Some((member, member.disk?)));
    for (member, disk) in disks.filter(|(_, disk)| !disk.terminating) {
        if member.fate == Fate::Stays && disk.claim.requested < wanted.requested {
            ask(&member.name, disk, &wanted.text, &mut draft);
        } else if let (Some(asked), Some(has)) = (disk.claim.requested, disk.claim.capacity)
            && has < asked
        {
            let how = disk.claim.resizing.as_deref().unwrap_or(
                "the resize has not started: check that the storage provider supports volume expansion",
            );
            let text = format!(
                "the volume of {} grows from {} to {}: {how}",
                member.name,
                in_words(has),
                in_words(asked)
            );
            draft.wait(Reason::VolumeGrowing, text, STEADY);
        }
    }
    draft
}

fn ask(member: &str, disk: &Disk, size: &str, draft: &mut Draft) {
    draft.say(format!("request {size} for the volume of {member}"));
    draft.add(actions::grow_volume(member, &disk.uid, size));
}
