//! Enables and disables etcd authentication, and changes the password, without a loss of the operators' access to etcd.
//!
//! Invariant 21: the operator records a password in its own Secret before it sets the password in etcd. It deletes a
//! recorded password only after etcd has accepted the desired password.

use api::names::{auth_secret, network_policy};
use etcd::Login;
use runtime::credentials::Record;

use crate::action::AuthChange;
use crate::plan::actions::{self, Builder};
use crate::plan::{Draft, STEADY, objects};
use crate::reason::Reason;
use crate::snapshot::{Kept, Seen};

/// Reports that members rejected the operator's credentials; `None` if no member rejected them.
pub(super) fn refused(build: Builder<'_>) -> Option<Draft<'_>> {
    let (desired, observed, _) = build.inputs();
    let why = observed.access.refused.as_ref()?;
    let remedy = match (&desired.access.secret, &observed.access.fault) {
        (_, Some(fault)) => fault.clone(),
        (Some(secret), None) => {
            format!("set the password of the user in Secret {secret} (spec.auth.secret)")
        }
        (None, None) => {
            "set spec.auth.secret to a Secret with username and password of a user with the role root".to_owned()
        }
    };
    let text = format!("the members reject the login of the operator ({why}): {remedy}");
    let mut draft = Draft::new(build);
    draft.problem(Reason::EtcdAccessDenied, text);
    Some(draft)
}

/// Maintains the authentication and the password of a cluster whose quorum answers.
pub(super) fn settle(build: Builder<'_>) -> Draft<'_> {
    let (rule, seen) = (&build.desired.access, &build.observed.access);
    let mut draft = Draft::new(build);
    if rule.secret.is_none() {
        return draft;
    }
    if let Some(fault) = &seen.fault {
        draft.problem(Reason::AuthSecret, fault.clone());
        return draft;
    }
    let Seen::Known(Some(login)) = &seen.login else {
        return draft;
    };
    let is_recorded = matches!(
        seen.record,
        Record::Wanted | Record::WantedUnmarked | Record::WantedFirst
    );
    if seen.record == Record::Damaged && matches!(login, Login::Refused(_)) {
        let name = auth_secret(&build.observed.cluster);
        let text = format!(
            "etcd rejects the password in the Secret of spec.auth.secret. The operator cannot read Secret {name}, in \
             which it has recorded former passwords. In the Secret of spec.auth.secret, set the password that etcd \
             accepts"
        );
        draft.problem(Reason::AuthSecret, text);
        return draft;
    }
    match (rule.auth, login) {
        (Some(true), Login::Off) if !seen.is_root => {
            let text = "spec.auth.enabled is true, but etcd enables authentication only with a user named root: set \
             the username in the Secret of spec.auth.secret to root";
            draft.problem(Reason::AuthUser, text);
        }
        (Some(true), Login::Off) => {
            draft.say("enable authentication in etcd");
            // Invariant 21: a password that is already recorded is not replaced, because an earlier attempt may have
            // set this password in etcd.
            let record = (!is_recorded).then(|| actions::record_passwords(true));
            let enable = build.auth(AuthChange::Enable);
            draft.chain(record.into_iter().chain([enable]).collect());
        }
        (Some(true), Login::Accepted) if seen.record != Record::Wanted => {
            draft.add(actions::record_passwords(false));
        }
        (Some(true), Login::Former) => {
            draft.say("set the password in etcd to the password in the Secret of spec.auth.secret");
            let record = (!is_recorded).then(|| actions::record_passwords(true));
            let change = build.auth(AuthChange::ChangePassword);
            draft.chain(record.into_iter().chain([change]).collect());
        }
        // If no password is recorded, another program or a person enabled authentication, so the operator does not
        // disable authentication.
        (Some(false), Login::Accepted | Login::Former) if seen.record == Record::None => {
            let text = "spec.auth.enabled is false, but another program or a person enabled authentication \
             in etcd, so the operator does not disable it. To disable authentication, run: etcdctl auth disable";
            draft.wait(Reason::AuthLeftOn, text, STEADY);
        }
        (Some(false), Login::Accepted | Login::Former) => {
            draft.say("disable authentication in etcd");
            draft.add(build.auth(AuthChange::Disable));
        }
        (Some(false), Login::Off) if seen.record != Record::None => {
            draft.add(actions::forget_passwords());
        }
        (None, Login::Former) => {
            let text = "the password in the Secret of spec.auth.secret differs from the password in etcd; the operator still uses the password in etcd: set spec.auth.enabled to true, so that the operator changes the password in etcd. Or change the password in etcd yourself";
            draft.problem(Reason::AuthSecret, text);
        }
        (_, Login::Off | Login::Accepted | Login::Refused(_)) => {}
    }
    draft
}

/// Creates or deletes the NetworkPolicy according to the spec.
pub(super) fn network(build: Builder<'_>) -> Draft<'_> {
    let mut draft = Draft::new(build);
    match (build.desired.access.network, build.observed.access.network) {
        (true, Kept::Missing | Kept::Drifted) => draft.add(build.apply_network_policy()),
        (true, Kept::Others) => {
            let name = network_policy(&build.observed.cluster);
            objects::taken("NetworkPolicy", &name, &mut draft);
        }
        (false, Kept::Drifted | Kept::AsMade(())) => draft.add(build.delete_network_policy()),
        (true, Kept::AsMade(())) | (false, Kept::Missing | Kept::Others) => {}
    }
    draft
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Access, AccessRule};
    use crate::plan::tests::scene::Scene;
    use crate::plan::tests::writes::{AccessWrite, Plan, Write};

    fn planned(enabled: Option<bool>, login: Login, record: Record) -> Plan {
        let mut scene = Scene::formed(&["a", "b", "c"]);
        scene.desired.access = AccessRule {
            auth: enabled,
            secret: Some("root".to_owned()),
            network: false,
        };
        scene.observed.access = Access {
            is_root: true,
            record,
            login: Seen::Known(Some(login)),
            ..Access::default()
        };
        scene.plan()
    }

    fn writes(plan: &Plan) -> Vec<AccessWrite> {
        let writes = plan.step.chains.iter().flatten();
        let access = writes.filter_map(|write| match write {
            Write::Access(write) => Some(*write),
            _ => None,
        });
        access.collect()
    }

    #[test]
    fn invariant_21_password_is_recorded_before_it_is_set_in_etcd() {
        use AccessWrite::{ChangePassword, Enable, Record as Note};
        let off = |record| writes(&planned(Some(true), Login::Off, record));
        assert_eq!(off(Record::None), [Note { others: true }, Enable]);
        assert_eq!(off(Record::Others), [Note { others: true }, Enable]);
        assert_eq!(off(Record::WantedFirst), [Enable]);
        assert_eq!(off(Record::Wanted), [Enable]);
        let former = |record| writes(&planned(Some(true), Login::Former, record));
        assert_eq!(
            former(Record::Others),
            [Note { others: true }, ChangePassword]
        );
        assert_eq!(former(Record::WantedFirst), [ChangePassword]);
    }

    #[test]
    fn invariant_21_old_password_is_kept_until_etcd_accepts_new_one() {
        let accepted = |record| writes(&planned(Some(true), Login::Accepted, record));
        for record in [Record::None, Record::Others, Record::WantedFirst] {
            assert_eq!(accepted(record), [AccessWrite::Record { others: false }]);
        }
        assert_eq!(accepted(Record::Wanted), []);
    }

    #[test]
    fn auth_is_disabled_only_if_operator_enabled_it() {
        let by_user = planned(Some(false), Login::Accepted, Record::None);
        assert_eq!(writes(&by_user), []);
        assert!(
            by_user
                .waiting_for
                .iter()
                .any(|one| one.reason == Reason::AuthLeftOn)
        );
        let by_us = planned(Some(false), Login::Accepted, Record::Wanted);
        assert_eq!(writes(&by_us), [AccessWrite::Disable]);
        let off = planned(Some(false), Login::Off, Record::Wanted);
        assert_eq!(writes(&off), [AccessWrite::Forget]);
        assert_eq!(writes(&planned(Some(false), Login::Off, Record::None)), []);
    }

    #[test]
    fn etcd_auth_is_unchanged_without_spec_auth_enabled() {
        for login in [Login::Off, Login::Accepted, Login::Former] {
            for record in [Record::None, Record::Others, Record::Wanted] {
                assert_eq!(writes(&planned(None, login.clone(), record)), []);
            }
        }
    }

    #[test]
    fn auth_is_not_enabled_for_user_other_than_root() {
        let mut scene = Scene::formed(&["a", "b", "c"]);
        scene.desired.access.auth = Some(true);
        scene.desired.access.secret = Some("admin".to_owned());
        scene.observed.access.login = Seen::Known(Some(Login::Off));
        let plan = scene.plan();
        assert_eq!(writes(&plan), []);
        assert!(
            plan.problems
                .iter()
                .any(|one| one.reason == Reason::AuthUser)
        );
    }

    #[test]
    fn network_policy_is_applied_or_deleted_as_spec_says() {
        let with = |wanted: bool, network| {
            let mut scene = Scene::formed(&["a", "b", "c"]);
            scene.desired.access.network = wanted;
            scene.observed.access.network = network;
            writes(&scene.plan())
        };
        assert_eq!(with(true, Kept::Missing), [AccessWrite::ApplyNetwork]);
        assert_eq!(with(true, Kept::Drifted), [AccessWrite::ApplyNetwork]);
        assert_eq!(with(true, Kept::AsMade(())), []);
        assert_eq!(with(false, Kept::AsMade(())), [AccessWrite::DeleteNetwork]);
        assert_eq!(with(false, Kept::Missing), []);
    }

    #[test]
    fn conflicting_network_policy_is_reported_and_never_written() {
        for (wanted, reported) in [(true, 1), (false, 0)] {
            let mut scene = Scene::formed(&["a", "b", "c"]);
            scene.desired.access.network = wanted;
            scene.observed.access.network = Kept::Others;
            let plan = scene.plan();
            assert_eq!(writes(&plan), []);
            let all = plan.problems.iter();
            let taken = all.filter(|one| one.reason == Reason::NameTaken);
            let taken: Vec<_> = taken.collect();
            assert_eq!(taken.len(), reported, "{taken:?}");
            let named = taken.iter().all(|one| one.message.contains("db-members"));
            assert!(named, "{taken:?}");
        }
    }
}
