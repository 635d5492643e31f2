//! Computes the status and the Events of an EtcdRole or EtcdUser. Performs no I/O.

use api::conditions::{ConditionType, is_true};
use api::readiness::{Readiness, set_readiness};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::execute::Executed;
use crate::object::AccessObject;
use crate::outcome::Error;
use crate::plan::{Call, Plan, Record};
use crate::reason::{Reason, Trouble};

/// The status after a reconcile.
pub(crate) fn compute<K: AccessObject>(
    object: &K,
    plan: &Plan,
    executed: &Executed,
    now: &Time,
) -> K::Status {
    let mut status = object.common_status();
    let generation = object.meta().generation;
    match &plan.record {
        Record::Keep => {}
        // The recorded password and the time of its check belong to the previous etcd cluster, or to the data before a
        // restore. Without this time, the operator checks the password again.
        Record::Owned(owned) => {
            (status.owned, status.password, status.checked) = (Some(owned.clone()), None, None);
        }
        Record::Forget => {
            (status.owned, status.password, status.checked) = (None, None, None);
        }
    }
    if executed.has_created
        && let Some(owned) = &mut status.owned
    {
        owned.created = true;
    }
    if let (Some(login), None) = (&plan.login, &executed.error) {
        status.password.clone_from(&login.password);
        status.checked = login.is_verified.then(|| now.clone());
    }
    let state = state(plan, executed.error.as_ref());
    set_readiness(
        &mut status.conditions,
        state.reason.readiness(),
        (state.reason.into(), state.message.as_str()),
        generation,
        now,
    );
    status.observed_generation = generation;
    K::status_from(status)
}

fn state(plan: &Plan, error: Option<&Error>) -> Trouble {
    error.map_or_else(|| plan.state.clone(), Error::trouble)
}

/// The Events about the changes of this reconcile, one for each kind of change.
pub(crate) fn changes<K: AccessObject>(object: &K, executed: &Executed) -> Vec<Notice> {
    let mut notices: Vec<Notice> = Vec::new();
    let (name, cluster) = (object.entry(), object.target());
    let corrects = is_correction(object);
    for call in &executed.calls {
        let reason = call.reason().as_str();
        if let Some(notice) = notices.iter_mut().find(|one| one.reason == reason) {
            notice.note.push_str(", ");
            notice.note.push_str(&call.to_string());
            continue;
        }
        let word = K::WORD;
        let mut note = format!("{word} {name} of EtcdCluster {cluster}: {call}");
        let is_drift = corrects && !matches!(call, Call::SetPassword);
        if is_drift {
            note = format!("correcting a change in etcd that the operator has not made: {note}");
        }
        notices.push(Notice {
            warning: is_drift,
            ..Notice::change(reason, "Reconcile", note)
        });
    }
    notices
}

/// The Event about the state of the object: a warning if an administrator must act. `None` if the object matches its
/// spec or is in progress.
pub(crate) fn waiting(plan: &Plan) -> Option<Notice> {
    let Trouble { reason, message } = plan.state.clone();
    let (word, action) = (reason.as_str(), "Reconcile");
    match (reason, reason.readiness()) {
        (Reason::AsDesired | Reason::InProgress, _) => None,
        (_, Readiness::Stalled) => Some(Notice::warning(word, action, message)),
        (_, Readiness::Ready | Readiness::Reconciling) => {
            Some(Notice::normal(word, action, message))
        }
    }
}

/// Whether a change of this reconcile corrects a change of another program: the role or the user has matched the
/// current spec before.
fn is_correction<K: AccessObject>(object: &K) -> bool {
    let status = object.common_status();
    let meta = object.meta();
    meta.deletion_timestamp.is_none()
        && status.observed_generation == meta.generation
        && is_true(&status.conditions, &ConditionType::Ready)
}

#[cfg(test)]
mod tests {
    use api::EtcdUser;
    use api::access::{EtcdUserStatus, OwnedStatus, PasswordStatus};
    use serde_json::json;

    use super::*;

    /// A restored cluster has another cluster ID, and may have an older password.
    #[test]
    fn new_ownership_record_clears_password_check() {
        let spec = json!({ "etcdCluster": { "name": "main" }, "password": { "secret": "app" } });
        let mut user = EtcdUser::new("app", serde_json::from_value(spec).unwrap());
        let epoch = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
        user.status = Some(EtcdUserStatus {
            owned: Some(OwnedStatus::default()),
            password: Some(PasswordStatus::default()),
            checked: Some(epoch.clone()),
            ..EtcdUserStatus::default()
        });
        let restored = OwnedStatus {
            cluster_id: "bb".to_owned(),
            ..OwnedStatus::default()
        };
        for (record, is_kept) in [(Record::Keep, true), (Record::Owned(restored), false)] {
            let plan = Plan {
                steps: Vec::new(),
                record,
                login: None,
                asks: false,
                state: Trouble::new(Reason::AsDesired, "as desired"),
            };
            let computed = compute(&user, &plan, &Executed::default(), &epoch);
            assert_eq!(computed.checked.is_some(), is_kept, "{plan:?}");
            assert_eq!(computed.password.is_some(), is_kept, "{plan:?}");
        }
    }
}
