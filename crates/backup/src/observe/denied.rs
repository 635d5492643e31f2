//! If a store denies access, completes the message with the field and the name of the Secret. The store client does not
//! know the field and the Secret.

use api::EtcdBackup;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Destination, Snapshot, Work, WorkState};

/// Prefix of the message if a store denies access. If etcd denies access, the message has another prefix.
const STORE_DENIAL: &str = "access denied: ";

/// Adds the field and the Secret to each message of a store that denies access.
pub(super) fn name_secret(backup: &EtcdBackup, snapshot: Snapshot) -> Snapshot {
    let identity = identity(backup);
    let complete = |trouble: Trouble| match &identity {
        Some(identity)
            if trouble.reason == Reason::AccessDenied
                && trouble.message.starts_with(STORE_DENIAL) =>
        {
            Trouble::new(trouble.reason, format!("{identity}: {}", trouble.message))
        }
        _ => trouble,
    };
    Snapshot {
        transfer: in_work(snapshot.transfer, &complete),
        removal: in_work(snapshot.removal, &complete),
        destination: match snapshot.destination {
            Destination::Unknown(trouble) => Destination::Unknown(complete(trouble)),
            destination => destination,
        },
        obstacle: snapshot.obstacle.map(&complete),
        ..snapshot
    }
}

fn in_work<T>(state: WorkState<T>, complete: &impl Fn(Trouble) -> Trouble) -> WorkState<T> {
    WorkState {
        work: match state.work {
            Work::Ended(Err(trouble)) => Work::Ended(Err(complete(trouble))),
            work => work,
        },
        last_failure: state.last_failure.map(complete),
        ..state
    }
}

/// The identity that the store rejected: a field with its Secret, or the identity of the operator's pod.
fn identity(backup: &EtcdBackup) -> Option<String> {
    let spec = &backup.spec;
    let blocks = spec.blocks();
    let source = blocks
        .select(&spec.storage_type, "spec", "storageType")
        .ok()?;
    match source.secrets().credentials {
        Some(secret) => Some(format!("{}: Secret {}", secret.field, secret.name)),
        None => source.has_bucket().then(|| {
            format!(
                "spec.{} names no Secret, so the backup operator uses its own cloud identity",
                source.block()
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::snapshot::Stored;

    fn backup(spec: &Value) -> EtcdBackup {
        EtcdBackup::new("b", serde_json::from_value(spec.clone()).unwrap())
    }

    #[test]
    fn message_of_store_denial_contains_secret_and_field() {
        let denied = || Trouble::new(Reason::AccessDenied, "access denied: 403 Forbidden");
        let snapshot = Snapshot {
            transfer: WorkState::<Stored> {
                work: Work::Ended(Err(denied())),
                last_failure: Some(denied()),
                ..WorkState::default()
            },
            destination: Destination::Unknown(denied()),
            obstacle: Some(denied()),
            ..Snapshot::default()
        };
        let s3 = json!({ "storageType": "S3", "s3": { "path": "b/k", "awsSecret": "aws" } });
        let named = name_secret(&backup(&s3), snapshot.clone());
        let expected = "spec.s3.awsSecret: Secret aws: access denied: 403 Forbidden";
        let Work::Ended(Err(trouble)) = &named.transfer.work else {
            panic!("{named:?}")
        };
        assert_eq!(trouble.message, expected);
        assert_eq!(named.transfer.last_failure.unwrap().message, expected);
        assert_eq!(named.obstacle.unwrap().message, expected);
        let ambient = json!({ "storageType": "GCS", "gcs": { "path": "b/k" } });
        let named = name_secret(&backup(&ambient), snapshot.clone());
        let Destination::Unknown(trouble) = named.destination else {
            panic!("the destination is known")
        };
        assert!(
            trouble.message.starts_with("spec.gcs names no Secret"),
            "{trouble:?}"
        );
        // `name_secret` does not change the message if the storage type is `Local`, which has no Secret, or if etcd
        // denied the access.
        let local = json!({ "storageType": "Local", "local": { "path": "k" } });
        assert_eq!(name_secret(&backup(&local), snapshot.clone()), snapshot);
        let etcd = Trouble::new(
            Reason::AccessDenied,
            "no snapshot from etcd: permission denied",
        );
        let of_etcd = Snapshot {
            destination: Destination::Unknown(etcd),
            ..Snapshot::default()
        };
        assert_eq!(name_secret(&backup(&s3), of_etcd.clone()), of_etcd);
    }
}
