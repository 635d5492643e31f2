//! The image of a member: its change in a running pod, and why the kubelet cannot pull it. Performs no I/O.

use api::names;
use k8s_openapi::api::core::v1::Pod;

/// The word in the text of [`Changed::note`] that means `unreadable: true`.
const UNREADABLE: &str = "unreadable";

/// A change of a pod's image in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The version before the change.
    pub from: String,
    /// Number of restarts of the container at the time of the change.
    pub restarts: i32,
    /// True if etcd of the previous version had failed to read the data before the change.
    pub unreadable: bool,
    /// The image before the change. `None` if neither the old nor the new image has a digest.
    pub image: Option<String>,
}

impl Changed {
    /// Parses the value of the annotation that records the change of the image on the pod.
    pub fn read(note: &str) -> Option<Self> {
        let mut words = note.splitn(4, '/');
        Some(Self {
            from: words.next()?.to_owned(),
            restarts: words.next()?.parse().ok()?,
            unreadable: words.next() == Some(UNREADABLE),
            image: words.next().map(str::to_owned),
        })
    }

    /// The value of the annotation that records the change of the image on the pod.
    pub fn note(&self) -> String {
        let Self { from, restarts, .. } = self;
        let unreadable = if self.unreadable { UNREADABLE } else { "" };
        let image = self.image.as_deref().unwrap_or_default();
        let note = format!("{from}/{restarts}/{unreadable}/{image}");
        note.trim_end_matches('/').to_owned()
    }

    /// The version before the change, with its image if known, as messages show it.
    pub fn before(&self) -> String {
        match &self.image {
            Some(image) => format!("{} (image {image})", self.from),
            None => self.from.clone(),
        }
    }
}

/// Sets the image of the etcd container, and the annotation with the requested image.
pub fn set_image(pod: &mut Pod, image: String) {
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(names::ANNOTATION_IMAGE.to_owned(), image.clone());
    let containers = pod.spec.iter_mut().flat_map(|spec| &mut spec.containers);
    if let Some(etcd) = { containers }.find(|one| one.name == names::CONTAINER_ETCD) {
        etcd.image = Some(image);
    }
}

/// The problem of an image that the kubelet cannot pull, with the cause first. `text` is the kubelet's message, and
/// `field` is the field of the spec that names the image: `spec.image` or `spec.repository`.
pub fn pull_problem(image: &str, field: &str, text: &str) -> String {
    let holds = |parts: &[&str]| {
        let text = text.to_lowercase();
        parts.iter().any(|part| text.contains(part))
    };
    let unreachable = [
        "i/o timeout",
        "no such host",
        "connection refused",
        "no route to host",
        "handshake timeout",
        "deadline exceeded",
        "server misbehaving",
    ];
    let (problem, remedy) = if holds(&[
        "unauthorized",
        "authorization failed",
        "access denied",
        "forbidden",
    ]) {
        let remedy = "add a pull Secret to spec.pod.imagePullSecrets, or correct spec.repository";
        (
            "cannot be pulled, because the registry denies access",
            remedy,
        )
    } else if holds(&unreachable) {
        let remedy = "check the network and the DNS of the node, or correct spec.repository";
        (
            "cannot be pulled, because the node cannot reach the registry",
            remedy,
        )
    } else if holds(&["no match for platform"]) {
        (
            "does not exist for the architecture of the node",
            "use an image for this architecture, or correct spec.repository",
        )
    } else if holds(&["not found", "manifest unknown", "does not exist"]) {
        ("does not exist", "correct spec.version or spec.repository")
    } else {
        (
            "cannot be pulled",
            "correct spec.version or spec.repository",
        )
    };
    let remedy = remedy.replace("spec.repository", field);
    format!("image {image} {problem}: {remedy} ({text})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_pull_problem_names_cause_and_remedy() {
        let image = "quay.io/coreos/etcd:v3.6.99";
        for (text, problem, remedy) in [
            (
                "quay.io/coreos/etcd:v3.6.99: not found",
                "does not exist",
                "spec.version",
            ),
            (
                "dial tcp: lookup quay.io: i/o timeout",
                "cannot reach the registry",
                "DNS of the node",
            ),
            (
                "401 Unauthorized",
                "denies access",
                "spec.pod.imagePullSecrets",
            ),
            (
                "no match for platform in manifest: not found",
                "architecture of the node",
                "correct spec.repository",
            ),
            ("ErrImageNeverPull", "cannot be pulled", "spec.version"),
        ] {
            let message = pull_problem(image, "spec.repository", text);
            let parts = [image, problem, remedy, text];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        // The second image has a tag, because the pod was created before a user set `spec.image`.
        for image in ["registry.local/etcd@sha256:ab", image] {
            let pinned = pull_problem(image, "spec.image", "not found");
            let remedy = "correct spec.version or spec.image (";
            assert!(pinned.contains(remedy), "{pinned}");
        }
    }

    #[test]
    fn image_change_annotation_round_trips() {
        let image = "r:5000/etcd@sha256:ab";
        for (note, from, restarts, unreadable, image) in [
            ("3.6.16/2", "3.6.16", 2, false, None),
            ("3.6.16/-1/unreadable", "3.6.16", -1, true, None),
            ("/0", "", 0, false, None),
            (
                "3.6.16/2//r:5000/etcd@sha256:ab",
                "3.6.16",
                2,
                false,
                Some(image),
            ),
            (
                "3.6.16/0/unreadable/r:5000/etcd@sha256:ab",
                "3.6.16",
                0,
                true,
                Some(image),
            ),
        ] {
            let changed = Changed {
                from: from.to_owned(),
                restarts,
                unreadable,
                image: image.map(str::to_owned),
            };
            assert_eq!(changed.note(), note);
            assert_eq!(Changed::read(note), Some(changed));
        }
        assert_eq!(Changed::read("3.6.16"), None);
        assert_eq!(Changed::read("3.6.16/often"), None);
    }
}
