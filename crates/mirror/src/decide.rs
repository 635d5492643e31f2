//! Decides how a mirror begins: whether it registers itself, copies all keys, follows its source, or refuses to work.
//! Performs no I/O.

use etcd::{ClusterId, KeyPage};

use crate::checkpoint::{Checkpoint, CopyReason, Identity, Phase, Stored, checkpoint_prefix};

/// What a mirror does first in an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The destination has no checkpoint of the mirror. The mirror creates this checkpoint if the destination has no
    /// key with the mirror's prefix.
    Register(Checkpoint),
    /// The mirror replaces its checkpoint by this checkpoint, and copies all keys again.
    Restart(Checkpoint),
    /// The mirror continues to copy all keys.
    Copy,
    /// The mirror applies the changes after its checkpoint.
    Follow,
}

/// Why a mirror refuses to work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The source and the destination are the same cluster.
    #[error(
        "the source and the destination are the same etcd cluster {0}: correct spec.source, because a mirror cannot \
         copy a cluster to itself"
    )]
    SameCluster(ClusterId),
    /// The destination contains keys that the mirror has not written.
    #[error(
        "the destination contains keys that begin with {prefix:?}, and no checkpoint of this mirror: delete these \
         keys, or create an EtcdMirror with another spec.destination.prefix"
    )]
    NotEmpty {
        /// The prefix of the destination.
        prefix: String,
    },
    /// The destination contained the checkpoint of the mirror before, and no longer contains it.
    #[error(
        "the destination no longer contains the checkpoint of this mirror: another process has promoted the \
         destination, or a user has deleted the checkpoint. To copy again, delete this EtcdMirror, and create another \
         one"
    )]
    CheckpointDeleted,
    /// Another mirror writes to the same keys.
    #[error(
        "the prefix {prefix:?} of the destination overlaps with the prefix {other_prefix:?} of EtcdMirror {other}: \
         choose another prefix, or promote the other mirror. If the other mirror no longer exists, delete the key \
         {key:?} in the destination"
    )]
    Overlap {
        /// The prefix of the destination.
        prefix: String,
        /// The namespace and the name of the other EtcdMirror.
        other: String,
        /// The prefix of the other EtcdMirror.
        other_prefix: String,
        /// The key of the other mirror's checkpoint.
        key: String,
    },
    /// The checkpoint has other prefixes than the spec.
    #[error(
        "the mirror has begun to copy from the prefix {source_prefix:?} to the prefix {destination_prefix:?}, and the \
         prefixes cannot be changed: restore them in the spec, or create another EtcdMirror"
    )]
    PrefixChanged {
        /// The prefix of the source in the checkpoint.
        source_prefix: String,
        /// The prefix of the destination in the checkpoint.
        destination_prefix: String,
    },
    /// The source is another cluster, or an earlier state of the same cluster.
    #[error(
        "the source is etcd cluster {found} at revision {revision}, but the destination contains etcd cluster \
         {expected} at revision {copied}. A copy of this source would delete all keys that it does not have. To copy \
         it, set the annotation {annotation}={found}/{copied}. Otherwise, correct spec.source"
    )]
    SourceReplaced {
        /// The cluster ID of the source.
        found: ClusterId,
        /// The newest revision of the source.
        revision: i64,
        /// The cluster ID in the checkpoint.
        expected: String,
        /// The revision in the checkpoint.
        copied: i64,
        /// The name of the annotation.
        annotation: &'static str,
    },
    /// A checkpoint cannot be parsed.
    #[error(
        "the key {key:?} in the destination is not a readable checkpoint of a mirror: update the operators, or delete \
         the key if no EtcdMirror uses it"
    )]
    Unreadable {
        /// The key.
        key: String,
    },
}

/// Decides how a mirror begins. `stored` is its checkpoint in the destination. `source` is the cluster ID and the
/// newest revision of the source. `accepted` is the value of the annotation with which a user approves another source.
///
/// # Errors
/// Fails if the mirror must not work until a user acts.
pub fn begin(
    identity: &Identity,
    stored: Option<&Stored>,
    source: (ClusterId, i64),
    destination: ClusterId,
    accepted: Option<&str>,
) -> Result<Beginning, Refusal> {
    let (found, revision) = source;
    if found == destination {
        return Err(Refusal::SameCluster(found));
    }
    let Some(stored) = stored else {
        return Ok(Beginning::Register(Checkpoint::new(identity, source)));
    };
    let checkpoint = &stored.checkpoint;
    let mapping = &identity.mapping;
    let prefixes = (mapping.source_prefix(), mapping.destination_prefix());
    if (&*checkpoint.source_prefix, &*checkpoint.destination_prefix) != prefixes {
        return Err(Refusal::PrefixChanged {
            source_prefix: checkpoint.source_prefix.clone(),
            destination_prefix: checkpoint.destination_prefix.clone(),
        });
    }
    let copied = checkpoint.reached();
    // Invariant 42: a copy of another source deletes the keys that this source does not have, so a user must approve
    // the source first.
    if !is_same_source(checkpoint, source) {
        if accepted != Some(format!("{found}/{copied}").as_str()) {
            return Err(Refusal::SourceReplaced {
                found,
                revision,
                expected: checkpoint.source.clone(),
                copied,
                annotation: api::names::ANNOTATION_ACCEPT_SOURCE,
            });
        }
        let next = checkpoint.restarted(source, CopyReason::SourceReplaced);
        return Ok(Beginning::Restart(next));
    }
    Ok(match checkpoint.phase {
        Phase::Copying { .. } => Beginning::Copy,
        Phase::Following { .. } => Beginning::Follow,
    })
}

/// Whether the source with this cluster ID (`found`) and this newest revision contains all revisions that a checkpoint
/// records.
pub fn is_same_source(checkpoint: &Checkpoint, (found, revision): (ClusterId, i64)) -> bool {
    checkpoint.source == found.to_string() && checkpoint.reached() <= revision
}

/// Checks that no other mirror writes to the keys of this mirror. `checkpoints` contains all checkpoints of the
/// destination.
///
/// Fails with the first mirror whose keys overlap, or with the first checkpoint that cannot be parsed.
pub fn check_overlap(identity: &Identity, checkpoints: &KeyPage) -> Result<(), Refusal> {
    let own = identity.mapping.destination_range();
    for (key, value) in &checkpoints.entries {
        let key = String::from_utf8_lossy(key).into_owned();
        let Ok(stored) = Stored::parse(value.clone()) else {
            return Err(Refusal::Unreadable { key });
        };
        let other = stored.checkpoint;
        let is_own = key.strip_prefix(&checkpoint_prefix()) == Some(identity.uid.as_str());
        if !is_own && other.destination_range().overlaps(&own) {
            return Err(Refusal::Overlap {
                prefix: identity.mapping.destination_prefix().to_owned(),
                other: other.name,
                other_prefix: other.destination_prefix,
                key,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::checkpoint::{Split, checkpoint_key};
    use crate::mapping::Mapping;

    const SOURCE: ClusterId = ClusterId(0xa);
    const DESTINATION: ClusterId = ClusterId(0xb);

    fn identity(uid: &str, prefix: &str) -> Identity {
        Identity {
            uid: uid.to_owned(),
            name: format!("prod/{uid}"),
            mapping: Mapping::new("/a/", prefix),
        }
    }

    fn stored(checkpoint: &Checkpoint) -> Stored {
        Stored::new(checkpoint.clone())
    }

    fn following(revision: i64) -> Checkpoint {
        let own = identity("m", "/b/");
        Checkpoint::new(&own, (SOURCE, revision)).copied(None)
    }

    fn begun(
        checkpoint: Option<&Checkpoint>,
        source: (ClusterId, i64),
        accepted: Option<&str>,
    ) -> Result<Beginning, Refusal> {
        let stored = checkpoint.map(stored);
        let own = identity("m", "/b/");
        begin(&own, stored.as_ref(), source, DESTINATION, accepted)
    }

    #[test]
    fn checkpoint_decides_how_mirror_begins() {
        let source = (SOURCE, 9);
        let new = Checkpoint::new(&identity("m", "/b/"), source);
        let registered = begun(None, source, None);
        assert_eq!(registered, Ok(Beginning::Register(new.clone())));
        assert_eq!(begun(Some(&new), source, None), Ok(Beginning::Copy));
        let known = following(9);
        assert_eq!(begun(Some(&known), source, None), Ok(Beginning::Follow));
        let same = begun(Some(&known), (DESTINATION, 9), None);
        assert_eq!(same, Err(Refusal::SameCluster(DESTINATION)));
    }

    /// Invariant 42: another cluster at the endpoint, or an earlier state of the source, must not cause deletions of
    /// copied keys.
    #[test]
    fn invariant_42_replaced_source_needs_approval() {
        let known = following(9);
        for source in [(ClusterId(0xc), 100), (SOURCE, 8)] {
            let approval = format!("{}/9", source.0);
            for wrong in [None, Some("c/8"), Some("a/10"), Some("")] {
                let refused = begun(Some(&known), source, wrong).unwrap_err();
                assert!(matches!(refused, Refusal::SourceReplaced { .. }));
                let text = refused.to_string();
                assert!(
                    text.contains(&format!("accept-source={approval}")),
                    "{text}"
                );
            }
            let restarted = begun(Some(&known), source, Some(&approval));
            let Ok(Beginning::Restart(next)) = restarted else {
                panic!("{restarted:?}");
            };
            assert_eq!(
                (next.source, next.revision),
                (source.0.to_string(), source.1)
            );
            // The approval names one source and the copied revision, so it does not permit a later replacement of the
            // source.
            let copied = following(source.1);
            let again = begun(Some(&copied), (ClusterId(0xd), 1), Some(&approval));
            assert!(matches!(again, Err(Refusal::SourceReplaced { .. })));
        }
    }

    /// Invariant 42: a source that lacks a transaction that is applied in part is not the source of the checkpoint.
    #[test]
    fn invariant_42_source_without_applied_revisions_is_refused() {
        let split = following(9).applied_in_part(Split {
            revision: 20,
            applied: 1,
        });
        assert!(is_same_source(&split, (SOURCE, 20)));
        for source in [(SOURCE, 19), (ClusterId(0xc), 20)] {
            assert!(!is_same_source(&split, source));
            let refused = begun(Some(&split), source, None);
            assert!(matches!(refused, Err(Refusal::SourceReplaced { .. })));
        }
    }

    #[test]
    fn mirror_with_changed_prefix_is_refused() {
        let known = stored(&following(9));
        let changed = identity("m", "/c/");
        let refused = begin(&changed, Some(&known), (SOURCE, 9), DESTINATION, None);
        assert!(matches!(refused, Err(Refusal::PrefixChanged { .. })));
    }

    /// Invariant 42: only one mirror writes to a key.
    #[test]
    fn invariant_42_mirrors_with_overlapping_prefixes_are_refused() {
        let page = |others: &[(&str, &str)]| KeyPage {
            cluster_id: DESTINATION,
            revision: 1,
            entries: others
                .iter()
                .map(|(uid, prefix)| {
                    let other = identity(uid, prefix);
                    let begun = Checkpoint::new(&other, (SOURCE, 1));
                    (checkpoint_key(uid), Stored::new(begun).value)
                })
                .collect(),
            first_changed: 1,
            has_more: false,
        };
        for (own, other, overlaps) in [
            ("/b/", "/b/", true),
            ("/b/", "/b/c/", true),
            ("/b/c/", "/b/", true),
            ("", "/b/", true),
            ("/b/", "", true),
            ("/b/", "/c/", false),
        ] {
            let checked = check_overlap(&identity("m", own), &page(&[("o", other)]));
            assert_eq!(checked.is_err(), overlaps, "{own} {other}");
            let own_record = check_overlap(&identity("o", own), &page(&[("o", other)]));
            assert_eq!(own_record, Ok(()));
        }
        let mut damaged = page(&[("o", "/c/")]);
        damaged.entries[0].1 = Bytes::from_static(b"?");
        let refused = check_overlap(&identity("m", "/b/"), &damaged);
        assert!(matches!(refused, Err(Refusal::Unreadable { .. })));
    }
}
