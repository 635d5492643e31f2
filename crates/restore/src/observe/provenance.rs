//! Compares a seed's pod with the recorded backup. Pure.
//!
//! The two may differ: an operator process that was suspended may create the pod late, from a backup that it had read
//! before another one was chosen. The arguments of a pod name the backup that it fetches. Its report describes the data
//! on its volume, which an earlier pod may have fetched.

use api::EtcdRestore;
use api::restore::ChosenBackup;
use api::storage::StorageBlock;
use k8s_openapi::api::core::v1::Pod;
use member::{FETCH, Origin};

use crate::plan::choice::{self, SHA256, SOURCE};
use crate::snapshot::{Another, PodFacts};

/// The argument with the value that is added to the revision.
const BUMP: &str = "--bump-revision=";

/// The arguments of the container `fetch`.
pub(crate) struct Asked<'a> {
    /// The storage block of the backup.
    pub(crate) source: StorageBlock,
    /// The text of the storage block in the arguments.
    pub(crate) text: &'a str,
    /// The required SHA-256 of the snapshot.
    pub(crate) sha256: Option<&'a str>,
    /// The value that is added to the revision; 0 without the argument.
    pub(crate) bump_revision: i64,
}

impl<'a> Asked<'a> {
    /// Reads the arguments of a pod; `None` if they cannot be parsed.
    pub(crate) fn of(pod: &'a Pod) -> Option<Self> {
        let text = argument(pod, FETCH, SOURCE)?;
        let raised = argument(pod, FETCH, BUMP);
        Some(Self {
            source: serde_json::from_str(text).ok()?,
            text,
            sha256: argument(pod, FETCH, SHA256),
            bump_revision: raised.map_or(Some(0), |by| by.parse().ok())?,
        })
    }

    fn is_at(&self, chosen: &ChosenBackup) -> bool {
        let is_written = || {
            let written = serde_json::to_string(&chosen.source);
            written.is_ok_and(|written| written == self.text)
        };
        self.source == chosen.source || is_written()
    }

    fn is_raised_otherwise(&self, chosen: &ChosenBackup) -> bool {
        chosen.bump_revision.max(0) != self.bump_revision
    }
}

/// The value of the argument with this prefix in an init container.
fn argument<'a>(pod: &'a Pod, container: &str, what: &str) -> Option<&'a str> {
    let mut containers = pod.spec.as_ref()?.init_containers.iter().flatten();
    let arguments = containers
        .find(|one| one.name == container)?
        .args
        .as_ref()?;
    arguments.iter().find_map(|one| one.strip_prefix(what))
}

/// Compares a seed's pod with the record, if both are readable.
pub(super) fn compare(restore: &EtcdRestore, pod: &Pod, facts: &mut PodFacts) {
    if let (Some(chosen), Some(asked)) = (choice::recorded(restore), Asked::of(pod)) {
        judge(chosen, &asked, facts);
    }
}

/// Compares a pod with these arguments.
pub(crate) fn judge(chosen: &ChosenBackup, asked: &Asked<'_>, facts: &mut PodFacts) {
    let differs = |told: Option<&str>| match (told, &chosen.sha256) {
        (Some(told), Some(recorded)) => !told.eq_ignore_ascii_case(recorded),
        _ => false,
    };
    let asks_another =
        !asked.is_at(chosen) || differs(asked.sha256) || asked.is_raised_otherwise(chosen);
    facts.vouched = asked.sha256.is_some()
        && chosen.sha256.is_some()
        && !differs(asked.sha256)
        && !asked.is_raised_otherwise(chosen);
    let Some(held) = facts.sha256.clone() else {
        facts.another =
            asks_another.then(|| Another::Fetches(words(chosen, asked, asked.sha256, None)));
        return;
    };
    let of = facts.of.as_ref();
    // An earlier pod may have fetched the data on the volume. The report names its source.
    let elsewhere = match (&chosen.sha256, of) {
        // The same backup may be stored in several locations.
        (Some(_), _) => differs(Some(&held)),
        (None, Some(of)) => of.place != choice::place(&chosen.source),
        (None, None) => asks_another,
    };
    let raised_otherwise = match of {
        Some(of) => u64::try_from(chosen.bump_revision.max(0)) != Ok(of.bump_revision),
        None => asked.is_raised_otherwise(chosen),
    };
    let other = elsewhere || raised_otherwise;
    facts.another = other.then(|| Another::Holds(words(chosen, asked, Some(&held), of)));
}

/// Describes the difference. The data on a volume may come from another location than that in the arguments.
fn words(
    chosen: &ChosenBackup,
    asked: &Asked<'_>,
    sha256: Option<&str>,
    of: Option<&Origin>,
) -> String {
    let told =
        |sha256: Option<&str>| sha256.map_or_else(String::new, |it| format!(", SHA-256 {it}"));
    let raised = |by: i64| match by {
        0 => String::new(),
        by => format!(", raised by {by}"),
    };
    let from = match of.map(|of| &of.place) {
        Some(place) if *place == choice::place(&chosen.source) => chosen.location.clone(),
        Some(place) if *place != choice::place(&asked.source) => {
            "another place, where a previous pod of it was told to fetch".to_owned()
        }
        _ => choice::location(&asked.source),
    };
    let by = of.and_then(|of| i64::try_from(of.bump_revision).ok());
    format!(
        "{from}{}{}, and recorded is {}{}{}",
        told(sha256),
        raised(by.unwrap_or(asked.bump_revision)),
        chosen.location,
        told(chosen.sha256.as_deref()),
        raised(chosen.bump_revision),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SHA: &str = "abcd";

    fn block(path: &str) -> StorageBlock {
        serde_json::from_value(json!({ "s3": { "path": path, "awsSecret": "aws" } })).unwrap()
    }

    /// A restore with a recorded backup.
    fn restore(sha256: Option<&str>, bump_revision: i64) -> EtcdRestore {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" } });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        let chosen = ChosenBackup {
            sha256: sha256.map(str::to_owned),
            bump_revision,
            ..choice::at(&restore, block("b/k"))
        };
        restore.status.get_or_insert_default().backup = Some(chosen);
        restore
    }

    fn pod(path: &str, more: &[&str]) -> Pod {
        let source = serde_json::to_string(&block(path)).unwrap();
        let mut arguments = vec![
            "seed".to_owned(),
            "fetch".to_owned(),
            format!("{SOURCE}{source}"),
        ];
        arguments.extend(more.iter().map(|one| (*one).to_owned()));
        serde_json::from_value(json!({ "spec": {
            "containers": [],
            "initContainers": [{ "name": "fetch", "args": arguments }],
        } }))
        .unwrap()
    }

    fn compared(restore: &EtcdRestore, pod: &Pod, held: Option<&str>) -> PodFacts {
        let mut facts = PodFacts {
            sha256: held.map(str::to_owned),
            restored: held.map(|_| 100),
            ..PodFacts::default()
        };
        compare(restore, pod, &mut facts);
        facts
    }

    #[test]
    fn detects_pod_that_fetches_other_backup() {
        let known = restore(Some(SHA), 0);
        let fetches = |pod: &Pod| {
            let facts = compared(&known, pod, None);
            matches!(facts.another, Some(Another::Fetches(_)))
        };
        assert!(!fetches(&pod("b/k", &["--sha256=ABCD"])));
        // The pod was created before the SHA-256 was known.
        assert!(!fetches(&pod("b/k", &[])));
        assert!(fetches(&pod("b/newer", &[])));
        assert!(fetches(&pod("b/k", &["--sha256=ffff"])));
        assert!(fetches(&pod("b/k", &["--bump-revision=7"])));
        // Without readable arguments or without a record, nothing is compared.
        assert!(!fetches(&Pod::default()));
        assert!(!fetches(&pod("b/k", &["--bump-revision=x"])));
        let mut unrecorded = known.clone();
        unrecorded.status.as_mut().unwrap().backup = None;
        assert_eq!(
            compared(&unrecorded, &pod("b/newer", &[]), None).another,
            None
        );
    }

    #[test]
    fn report_overrides_arguments_of_pod() {
        let holds = |restore: &EtcdRestore, pod: &Pod, held| {
            let facts = compared(restore, pod, Some(held));
            matches!(facts.another, Some(Another::Holds(_)))
        };
        let known = restore(Some(SHA), 0);
        assert!(!holds(&known, &pod("b/k", &[]), SHA));
        assert!(!holds(&known, &pod("b/copy", &[]), SHA));
        assert!(holds(&known, &pod("b/k", &[]), "ffff"));
        assert!(holds(&known, &pod("b/k", &["--bump-revision=7"]), SHA));
        // Without a manifest only the location can be compared.
        let unknown = restore(None, 0);
        assert!(!holds(&unknown, &pod("b/k", &[]), "ffff"));
        assert!(holds(&unknown, &pod("b/newer", &[]), "ffff"));
        let text = match compared(&known, &pod("b/newer", &[]), Some("ffff")).another {
            Some(Another::Holds(text)) => text,
            other => panic!("{other:?}"),
        };
        for part in ["s3://b/newer, SHA-256 ffff", "s3://b/k, SHA-256 abcd"] {
            assert!(text.contains(part), "{text}");
        }
    }

    /// The backup has no manifest, and an earlier pod has fetched the data on the volume.
    #[test]
    fn detects_other_backup_on_volume() {
        let (here, elsewhere) = (
            choice::place(&block("b/k")),
            choice::place(&block("b/newer")),
        );
        let held = |restore: &EtcdRestore, pod: &Pod, place: &str, by: u64| {
            let mut facts = PodFacts {
                sha256: Some("ffff".into()),
                restored: Some(100),
                of: Some(Origin {
                    place: place.to_owned(),
                    bump_revision: by,
                }),
                ..PodFacts::default()
            };
            compare(restore, pod, &mut facts);
            match facts.another {
                Some(Another::Holds(text)) => Some(text),
                other => {
                    assert_eq!(other, None);
                    None
                }
            }
        };
        let (unknown, right) = (restore(None, 7), pod("b/k", &["--bump-revision=7"]));
        let late = pod("b/newer", &[]);
        for pod in [&right, &late] {
            assert_eq!(held(&unknown, pod, &here, 7), None);
            assert!(held(&unknown, pod, &elsewhere, 7).is_some());
            assert!(held(&unknown, pod, &here, 0).is_some());
        }
        let said = held(&unknown, &right, &elsewhere, 0).unwrap();
        for part in [
            "another place",
            "recorded is s3://b/k, raised by 7",
            "SHA-256 ffff",
        ] {
            assert!(said.contains(part), "{said}");
        }
        // With a known SHA-256 a copy in another location is accepted, but not another increase of the revision.
        let known = restore(Some("ffff"), 7);
        assert_eq!(held(&known, &late, &elsewhere, 7), None);
        assert!(held(&known, &right, &here, 0).is_some());
    }

    #[test]
    fn recognizes_pod_that_requires_recorded_sha256() {
        let known = restore(Some(SHA), 0);
        assert!(compared(&known, &pod("b/k", &["--sha256=ABCD"]), None).vouched);
        assert!(!compared(&known, &pod("b/k", &["--sha256=ffff"]), None).vouched);
        assert!(!compared(&known, &pod("b/k", &[]), None).vouched);
        let unknown = restore(None, 0);
        assert!(!compared(&unknown, &pod("b/k", &["--sha256=abcd"]), None).vouched);
        // The backup is the same, but the increase of the revision differs.
        let raised = pod("b/k", &["--sha256=ABCD", "--bump-revision=7"]);
        assert!(!compared(&known, &raised, None).vouched);
    }
}
