//! Names the field and the Secret in a store's denial of access: the store itself names neither. Pure.

use api::EtcdBackup;
use store::secrets_of;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Pace, Place, Snapshot, Work};

/// What a store's refusal begins with; etcd's begins otherwise.
const REFUSED: &str = "access denied: ";

/// The snapshot, with the field and the Secret in every denial of a store.
pub(super) fn with_its_secret(backup: &EtcdBackup, snapshot: Snapshot) -> Snapshot {
    let who = who(backup);
    let say = |trouble: Trouble| match &who {
        Some(who)
            if trouble.reason == Reason::AccessDenied && trouble.message.starts_with(REFUSED) =>
        {
            Trouble::new(trouble.reason, format!("{who}: {}", trouble.message))
        }
        _ => trouble,
    };
    Snapshot {
        transfer: in_pace(snapshot.transfer, &say),
        removal: in_pace(snapshot.removal, &say),
        place: match snapshot.place {
            Place::Unknown(trouble) => Place::Unknown(say(trouble)),
            place => place,
        },
        obstacle: snapshot.obstacle.map(&say),
        ..snapshot
    }
}

fn in_pace<T>(pace: Pace<T>, say: &impl Fn(Trouble) -> Trouble) -> Pace<T> {
    Pace {
        work: match pace.work {
            Work::Ended(Err(trouble)) => Work::Ended(Err(say(trouble))),
            work => work,
        },
        before: pace.before.map(say),
        ..pace
    }
}

/// The field and the Secret the store was asked with; without a Secret the pod's own identity.
fn who(backup: &EtcdBackup) -> Option<String> {
    let spec = &backup.spec;
    let blocks = spec.blocks();
    let source = blocks
        .select(&spec.storage_type, "spec", "storageType")
        .ok()?;
    match secrets_of(&source).credentials {
        Some(secret) => Some(format!("{}: Secret {}", secret.field, secret.name)),
        None => source.has_bucket().then(|| {
            format!(
                "spec.{} names no Secret: the backup operator's own identity",
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
    fn a_refusal_of_a_store_names_the_secret_and_its_field() {
        let denied = || Trouble::new(Reason::AccessDenied, "access denied: 403 Forbidden");
        let snapshot = Snapshot {
            transfer: Pace::<Stored> {
                work: Work::Ended(Err(denied())),
                before: Some(denied()),
                ..Pace::default()
            },
            place: Place::Unknown(denied()),
            obstacle: Some(denied()),
            ..Snapshot::default()
        };
        let s3 = json!({ "storageType": "S3", "s3": { "path": "b/k", "awsSecret": "aws" } });
        let said = with_its_secret(&backup(&s3), snapshot.clone());
        let expected = "spec.s3.awsSecret: Secret aws: access denied: 403 Forbidden";
        let Work::Ended(Err(trouble)) = &said.transfer.work else {
            panic!("{said:?}")
        };
        assert_eq!(trouble.message, expected);
        assert_eq!(said.transfer.before.unwrap().message, expected);
        assert_eq!(said.obstacle.unwrap().message, expected);
        let ambient = json!({ "storageType": "GCS", "gcs": { "path": "b/k" } });
        let Place::Unknown(trouble) = with_its_secret(&backup(&ambient), snapshot.clone()).place
        else {
            panic!("not unknown")
        };
        assert!(
            trouble.message.starts_with("spec.gcs names no Secret"),
            "{trouble:?}"
        );
        // A directory has no Secret, and etcd's refusal names its own.
        let local = json!({ "storageType": "Local", "local": { "path": "k" } });
        assert_eq!(with_its_secret(&backup(&local), snapshot.clone()), snapshot);
        let etcd = Trouble::new(
            Reason::AccessDenied,
            "no snapshot from etcd: permission denied",
        );
        let of_etcd = Snapshot {
            place: Place::Unknown(etcd),
            ..Snapshot::default()
        };
        assert_eq!(with_its_secret(&backup(&s3), of_etcd.clone()), of_etcd);
    }
}
