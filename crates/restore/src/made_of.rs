//! Whether a seed's pod is of the backup that is recorded. It need not be: an operator that stood still while another one
//! led may make it late, of what it had read before that was chosen anew. What a pod fetches stands in its arguments, what
//! it holds in its report: that is of the backup which the pod fetched that made it, on whose volume this one may be. Pure.

use api::EtcdRestore;
use api::restore::ChosenBackup;
use api::storage::StorageBlock;
use k8s_openapi::api::core::v1::Pod;
use runtime::member::{FETCH, Origin, RESTORE};

use crate::choice::{self, SOURCE};
use crate::observed::{Another, PodFacts};

/// What the argument begins with that says which SHA-256 the snapshot must have.
pub const SHA256: &str = "--sha256=";
/// What the argument begins with that says by how much the revision is raised.
const BUMP: &str = "--bump-revision=";

/// What a seed's pod is told to fetch.
pub struct Asked<'a> {
    /// The place.
    pub source: StorageBlock,
    /// The same, as it is written there.
    pub(crate) text: &'a str,
    /// The SHA-256 the snapshot must have.
    pub(crate) sha256: Option<&'a str>,
    /// By how much the revision is raised; 0 where it is not.
    pub bump_revision: i64,
}

impl<'a> Asked<'a> {
    /// Reads the arguments of the containers that make it; `None` where they cannot be read.
    pub fn of(pod: &'a Pod) -> Option<Self> {
        let text = argument(pod, FETCH, SOURCE)?;
        // Seeds of earlier releases had a container of its own for the data directory, and that alone was told so.
        let raised = argument(pod, FETCH, BUMP).or_else(|| argument(pod, RESTORE, BUMP));
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
        chosen
            .bump_revision
            .is_some_and(|by| by.max(0) != self.bump_revision)
    }
}

/// What follows `what` in the arguments of one of the first containers.
fn argument<'a>(pod: &'a Pod, container: &str, what: &str) -> Option<&'a str> {
    let mut containers = pod.spec.as_ref()?.init_containers.iter().flatten();
    let arguments = containers
        .find(|one| one.name == container)?
        .args
        .as_ref()?;
    arguments.iter().find_map(|one| one.strip_prefix(what))
}

/// Compares a seed's pod with the record, where both say something.
pub fn compare(restore: &EtcdRestore, pod: &Pod, facts: &mut PodFacts) {
    if let (Some(chosen), Some(asked)) = (choice::recorded(restore), Asked::of(pod)) {
        let status = restore.status.as_ref();
        let verified = status.and_then(|status| status.restored_revision);
        judge((chosen, verified), &asked, facts);
    }
}

/// The same, of a pod that was told this. `verified` is the revision of the seed that was found to serve.
pub(crate) fn judge(
    (chosen, verified): (&ChosenBackup, Option<i64>),
    asked: &Asked<'_>,
    facts: &mut PodFacts,
) {
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
    let is_verified = verified.is_some() && facts.restored == verified;
    let of = facts.of.as_ref();
    // What is on its volume it has not made: that says itself of which backup it is.
    let elsewhere = match (&chosen.sha256, of, of.and_then(|of| of.place.as_ref())) {
        // Another place may hold the same.
        (Some(_), ..) => differs(Some(&held)),
        (None, _, Some(place)) => *place != choice::place(&chosen.source),
        // It was there before this release, and nobody says of which backup it is.
        (None, Some(_), None) => asks_another || !is_verified,
        // A program of an earlier release says nothing of it.
        (None, None, _) => asks_another,
    };
    let raised = of.and_then(|of| i64::try_from(of.bump_revision?).ok());
    let raised_otherwise = match (raised, chosen.bump_revision) {
        (Some(raised), Some(by)) => by.max(0) != raised,
        _ => asked.is_raised_otherwise(chosen) && !is_verified,
    };
    let other = elsewhere || raised_otherwise;
    facts.another = other.then(|| Another::Holds(words(chosen, asked, Some(&held), of)));
}

/// How they differ. What a pod has found on its volume need not be of the place it was told.
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
    let place = of.map(|of| of.place.as_ref());
    let from = match place {
        Some(Some(place)) if *place == choice::place(&chosen.source) => chosen.location.clone(),
        Some(Some(place)) if *place != choice::place(&asked.source) => {
            "another place, where an earlier pod of it was told to fetch".to_owned()
        }
        Some(None) => "a place that nobody has written down".to_owned(),
        _ => choice::location(&asked.source),
    };
    let by = of.and_then(|of| i64::try_from(of.bump_revision?).ok());
    format!(
        "{from}{}{}, and recorded is {}{}{}",
        told(sha256),
        raised(by.unwrap_or(asked.bump_revision)),
        chosen.location,
        told(chosen.sha256.as_deref()),
        raised(chosen.bump_revision.unwrap_or_default()),
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

    /// What is recorded.
    fn restore(sha256: Option<&str>, bump_revision: Option<i64>) -> EtcdRestore {
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
    fn a_pod_that_fetches_another_backup_than_recorded_is_found_out() {
        let known = restore(Some(SHA), Some(0));
        let fetches = |pod: &Pod| {
            let facts = compared(&known, pod, None);
            matches!(facts.another, Some(Another::Fetches(_)))
        };
        assert!(!fetches(&pod("b/k", &["--sha256=ABCD"])));
        // Made before it was known.
        assert!(!fetches(&pod("b/k", &[])));
        assert!(fetches(&pod("b/newer", &[])));
        assert!(fetches(&pod("b/k", &["--sha256=ffff"])));
        assert!(fetches(&pod("b/k", &["--bump-revision=7"])));
        // What nobody can read, and of which nothing is recorded, tells nothing.
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
    fn what_a_pod_holds_says_more_than_what_it_was_told() {
        let holds = |restore: &EtcdRestore, pod: &Pod, held| {
            let facts = compared(restore, pod, Some(held));
            matches!(facts.another, Some(Another::Holds(_)))
        };
        let known = restore(Some(SHA), Some(0));
        assert!(!holds(&known, &pod("b/k", &[]), SHA));
        assert!(!holds(&known, &pod("b/copy", &[]), SHA));
        assert!(holds(&known, &pod("b/k", &[]), "ffff"));
        assert!(holds(&known, &pod("b/k", &["--bump-revision=7"]), SHA));
        // On its volume it has found what was verified.
        let mut verified = known.clone();
        verified.status.as_mut().unwrap().restored_revision = Some(100);
        assert!(!holds(&verified, &pod("b/k", &["--bump-revision=7"]), SHA));
        // Without a manifest the place is all there is.
        let unknown = restore(None, Some(0));
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

    /// Of a backup without a manifest, on a volume that another pod has filled.
    #[test]
    fn a_pod_that_has_found_something_on_its_volume_tells_of_which_backup_that_is() {
        let (here, elsewhere) = (
            choice::place(&block("b/k")),
            choice::place(&block("b/newer")),
        );
        let held = |restore: &EtcdRestore, pod: &Pod, place: Option<&str>, by: Option<u64>| {
            let mut facts = PodFacts {
                sha256: Some("ffff".into()),
                restored: Some(100),
                of: Some(Origin {
                    place: place.map(str::to_owned),
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
        let (unknown, right) = (restore(None, Some(7)), pod("b/k", &["--bump-revision=7"]));
        let late = pod("b/newer", &[]);
        for pod in [&right, &late] {
            assert_eq!(held(&unknown, pod, Some(&here), Some(7)), None);
            assert!(held(&unknown, pod, Some(&elsewhere), Some(7)).is_some());
            assert!(held(&unknown, pod, Some(&here), Some(0)).is_some());
        }
        let said = held(&unknown, &right, Some(&elsewhere), Some(0)).unwrap();
        for part in [
            "another place",
            "recorded is s3://b/k, raised by 7",
            "SHA-256 ffff",
        ] {
            assert!(said.contains(part), "{said}");
        }
        // An earlier release has made it, and of which backup nobody says: it is accepted where the SHA-256 says so, or it is
        // what was verified.
        assert!(held(&unknown, &right, None, None).is_some());
        let mut verified = unknown.clone();
        verified.status.as_mut().unwrap().restored_revision = Some(100);
        assert_eq!(held(&verified, &right, None, None), None);
        assert!(held(&verified, &late, None, None).is_some());
        assert_eq!(
            held(&restore(Some("ffff"), Some(7)), &right, None, None),
            None
        );
        // What is known by its SHA-256 may have come from a copy, and not be raised otherwise.
        let known = restore(Some("ffff"), Some(7));
        assert_eq!(held(&known, &late, Some(&elsewhere), Some(7)), None);
        assert!(held(&known, &right, Some(&here), Some(0)).is_some());
        // An earlier build has not recorded by how much.
        let before = restore(None, None);
        assert_eq!(held(&before, &right, Some(&here), Some(0)), None);
    }

    /// They were told so in the container that made the data directory.
    #[test]
    fn by_how_much_the_seeds_of_earlier_releases_are_raised_is_read() {
        let told = |by: &str| {
            let mut seed = pod("b/k", &[]);
            let makes = json!({ "name": "restore", "args": ["seed", "restore", by] });
            let first = seed.spec.as_mut().unwrap().init_containers.as_mut();
            first.unwrap().push(serde_json::from_value(makes).unwrap());
            seed
        };
        let (raised, plain) = (told("--bump-revision=7"), told("--token=x"));
        assert_eq!(Asked::of(&raised).unwrap().bump_revision, 7);
        assert_eq!(Asked::of(&plain).unwrap().bump_revision, 0);
        assert!(Asked::of(&told("--bump-revision=x")).is_none());
        // It is recorded so, whatever the spec says by now, and is of that record.
        let chosen = choice::of_pod(&restore(None, None), &raised).unwrap();
        assert_eq!(chosen.bump_revision, Some(7));
        let known = restore(Some(SHA), Some(7));
        assert_eq!(compared(&known, &raised, None).another, None);
        let facts = compared(&known, &plain, None);
        assert!(matches!(facts.another, Some(Another::Fetches(_))));
    }

    /// They were recorded without it.
    #[test]
    fn by_how_much_it_is_raised_is_not_compared_where_an_earlier_build_began_it() {
        let facts = compared(
            &restore(Some(SHA), None),
            &pod("b/k", &["--bump-revision=7"]),
            None,
        );
        assert_eq!(facts.another, None);
    }

    #[test]
    fn a_pod_that_refuses_everything_but_the_recorded_sha256_vouches_for_what_it_serves() {
        let known = restore(Some(SHA), Some(0));
        assert!(compared(&known, &pod("b/k", &["--sha256=ABCD"]), None).vouched);
        assert!(!compared(&known, &pod("b/k", &["--sha256=ffff"]), None).vouched);
        assert!(!compared(&known, &pod("b/k", &[]), None).vouched);
        let unknown = restore(None, Some(0));
        assert!(!compared(&unknown, &pod("b/k", &["--sha256=abcd"]), None).vouched);
        // It is the same backup, and not the same history.
        let raised = pod("b/k", &["--sha256=ABCD", "--bump-revision=7"]);
        assert!(!compared(&known, &raised, None).vouched);
    }
}
