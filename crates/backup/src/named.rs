//! Whose rights were not enough: a store says that it denies access, and not which field names who asked. Pure.

use api::EtcdBackup;
use api::conditions::Reason;
use store::secrets_of;

use crate::observed::{Observed, Pace, Place, Trouble, Work};

/// What a store's refusal begins with; etcd's begins otherwise.
const REFUSED: &str = "access denied: ";

/// What was found, with the field and the Secret in what stores have refused.
pub(crate) fn named(backup: &EtcdBackup, observed: Observed) -> Observed {
    let who = who(backup);
    let say = |trouble: Trouble| match &who {
        Some(who)
            if trouble.reason == Reason::AccessDenied && trouble.message.starts_with(REFUSED) =>
        {
            Trouble::new(trouble.reason, format!("{who}: {}", trouble.message))
        }
        _ => trouble,
    };
    Observed {
        transfer: in_pace(observed.transfer, &say),
        removal: in_pace(observed.removal, &say),
        place: match observed.place {
            Place::Unknown(trouble) => Place::Unknown(say(trouble)),
            place => place,
        },
        obstacle: observed.obstacle.map(&say),
        since: observed.since,
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
    use crate::observed::Stored;

    fn backup(spec: &Value) -> EtcdBackup {
        EtcdBackup::new("b", serde_json::from_value(spec.clone()).unwrap())
    }

    #[test]
    fn a_refusal_of_a_store_names_the_secret_and_its_field() {
        let denied = || Trouble::new(Reason::AccessDenied, "access denied: 403 Forbidden");
        let observed = Observed {
            transfer: Pace::<Stored> {
                work: Work::Ended(Err(denied())),
                before: Some(denied()),
                ..Pace::default()
            },
            place: Place::Unknown(denied()),
            obstacle: Some(denied()),
            ..Observed::default()
        };
        let s3 = json!({ "storageType": "S3", "s3": { "path": "b/k", "awsSecret": "aws" } });
        let said = named(&backup(&s3), observed.clone());
        let expected = "spec.s3.awsSecret: Secret aws: access denied: 403 Forbidden";
        let Work::Ended(Err(trouble)) = &said.transfer.work else {
            panic!("{said:?}")
        };
        assert_eq!(trouble.message, expected);
        assert_eq!(said.transfer.before.unwrap().message, expected);
        assert_eq!(said.obstacle.unwrap().message, expected);
        let ambient = json!({ "storageType": "GCS", "gcs": { "path": "b/k" } });
        let Place::Unknown(trouble) = named(&backup(&ambient), observed.clone()).place else {
            panic!("not unknown")
        };
        assert!(
            trouble.message.starts_with("spec.gcs names no Secret"),
            "{trouble:?}"
        );
        // A directory has no Secret, and etcd's refusal names its own.
        let local = json!({ "storageType": "Local", "local": { "path": "k" } });
        assert_eq!(named(&backup(&local), observed.clone()), observed);
        let etcd = Trouble::new(
            Reason::AccessDenied,
            "no snapshot from etcd: permission denied",
        );
        let of_etcd = Observed {
            place: Place::Unknown(etcd),
            ..Observed::default()
        };
        assert_eq!(named(&backup(&s3), of_etcd.clone()), of_etcd);
    }
}
