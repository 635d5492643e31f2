//! Images that `spec.image` pins by digest. A digest does not show the version of etcd, so the operator compares
//! `spec.version` with the version that a member with this image reports.

use api::names;
use api::version::EtcdVersion;
use member::MetadataPatch;

use crate::plan::view::{MemberState, View};
use crate::plan::{Draft, actions, versions};
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed, Pod};

/// The version of etcd in the pinned image of a member. `None` for an image without a digest, and until the member
/// answers with this image.
fn contained(observed: &Observed, name: &str, pod: &Pod) -> Option<EtcdVersion> {
    let changed = pod.changed.as_ref();
    let has_restarted = changed.is_none_or(|changed| pod.restarts > changed.restarts);
    let runs = pod.running && pod.stays() && has_restarted && pod.image.contains('@');
    let answer = observed.answer(name).filter(|_| runs)?;
    EtcdVersion::parse(&answer.version).ok()
}

/// Why `spec.version` is not the version in `spec.image`, and the remedy; `None` if no member shows a difference.
pub(super) fn mismatch(
    desired: &Desired,
    observed: &Observed,
    members: &[MemberState],
) -> Option<String> {
    members.iter().find_map(|member| {
        let (name, wanted) = (&member.name, &desired.version);
        let pod = member.pod.filter(|pod| pod.image == desired.image)?;
        let version = contained(observed, name, pod)?.to_string();
        (version != *wanted).then(|| {
            format!(
                "spec.image contains etcd {version}, as {name} reports, but spec.version is {wanted}. The operator \
                 changes no other member: set spec.version to {version}, or set spec.image to an image of etcd {wanted}"
            )
        })
    })
}

/// Invariant 39: reports a pinned image that contains another version than `spec.version`. Returns true if the rolling
/// update must wait.
///
/// Sets the version in the annotation of each pod with a pinned image to the version that its member reports. The
/// rolling update therefore continues whether the user corrects `spec.version` or `spec.image`.
pub(super) fn stops(view: &View, draft: &mut Draft) -> bool {
    let (desired, observed, _) = draft.build.inputs();
    let mut waits = false;
    let pods = view.members.iter().filter_map(|member| {
        let version = contained(observed, &member.name, member.pod?)?;
        Some((&member.name, member.pod?, version))
    });
    for (name, pod, version) in pods {
        if versions::made_for(pod).as_ref() != Some(&version) {
            let mut patch = MetadataPatch::default();
            let key = names::ANNOTATION_VERSION.to_owned();
            patch.annotations.insert(key, Some(version.to_string()));
            draft.add(actions::change_metadata(name, &pod.uid, &patch));
            waits = true;
        }
    }
    if let Some(why) = mismatch(desired, observed, &view.members) {
        draft.problem(Reason::VersionMismatch, why);
        waits = true;
    }
    waits
}
