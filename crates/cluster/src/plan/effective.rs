//! The spec in effect: the user's spec with the TLS settings that the members use at present, and with the data of the
//! TLS Secrets. After the backup that `BackupThenDelete` requires, `deletionPolicy` is `Delete` (invariant 41).
//!
//! A user may change `spec.TLS` in one step, but the members change in several steps (invariant 23).

use api::EtcdCluster;
use api::cluster::{ClusterDeletionPolicy, TlsPolicy};
use api::names::{ANNOTATION_AUTHORITIES, ANNOTATION_CLUSTER_ID};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use member::tls::{Authorities, Fault, FaultKind};

use crate::objects::Objects;
use crate::switch::{TlsMode, TlsRollout};

/// The spec in effect, and the progress of a TLS change.
#[derive(Clone, Debug)]
pub struct Effective {
    cluster: EtcdCluster,
    rollout: TlsRollout,
}

impl Effective {
    /// Computes the spec in effect from the objects that were read.
    pub fn of(objects: &Objects, now: Timestamp) -> Self {
        let mut cluster = objects.cluster.clone();
        let mut rollout = TlsRollout::of(&objects.started, cluster.spec.tls.as_ref());
        // A running cluster keeps its TLS settings until the operator starts the members with the new settings.
        cluster.spec.tls.clone_from(&rollout.at);
        let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
        // The members of a running cluster keep the form of their addresses (host name or IP address), even if their
        // certificates now cover another form.
        let form = objects.form.clone();
        let tls = &objects.tls;
        tls.complete_spec(&mut cluster.spec, (&namespace, &name), form);
        let pods = objects.pods.iter().map(ResourceExt::annotations);
        let claims = objects.claims.iter().map(ResourceExt::annotations);
        let mut notes = pods.chain(claims);
        let is_marked = notes.any(|notes| notes.contains_key(ANNOTATION_CLUSTER_ID));
        if cluster.spec.backs_up_before_deletion() && cluster.may_be_deleted(is_marked) {
            cluster.spec.deletion_policy = Some(ClusterDeletionPolicy::Delete);
        }
        if let Some(next) = &mut rollout.next {
            let policies = (rollout.at.as_ref(), next.to.as_ref());
            next.faults = faults(&cluster, objects, policies, now);
        }
        Self { cluster, rollout }
    }

    /// The spec in effect of a cluster without members: the user's spec.
    #[cfg(test)]
    pub(crate) fn as_written(cluster: EtcdCluster) -> Self {
        let started = crate::switch::Started::default();
        let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
        Self { cluster, rollout }
    }

    /// The EtcdCluster with the spec in effect.
    pub fn cluster(&self) -> &EtcdCluster {
        &self.cluster
    }

    /// The progress of a TLS change.
    pub fn tls_rollout(&self) -> &TlsRollout {
        &self.rollout
    }
}

/// The problems of the certificates for the next TLS stage. A missing generated certificate is no problem, because the
/// operator creates it in that stage. If the stage changes between static certificates and cert-manager, members of
/// both stages must trust each other (invariant 20).
fn faults(
    cluster: &EtcdCluster,
    objects: &Objects,
    (at, next): (Option<&TlsPolicy>, Option<&TlsPolicy>),
    now: Timestamp,
) -> Vec<Fault> {
    let generated = next.is_some_and(|tls| tls.generated.is_some());
    let addresses = member::addresses(cluster);
    let mut faults = objects.next_tls.faults(&addresses, now);
    faults.retain(|fault| !(generated && fault.code == FaultKind::SecretMissing));
    let makers = TlsMode::of(at).maker.zip(TlsMode::of(next).maker);
    if makers.is_some_and(|(mine, theirs)| mine != theirs && !mine.exchanges(theirs)) {
        let noted = |pod: &Pod| {
            let text = pod.annotations().get(ANNOTATION_AUTHORITIES)?;
            Some((pod.name_any(), Authorities::read(text)))
        };
        let started = objects.pods.iter().filter_map(noted).collect();
        let (held, place) = (&objects.next_tls, (&addresses, now));
        faults.extend(objects.tls.fault_of_change(held, &started, place));
    }
    let faults = faults.into_iter();
    faults.map(|fault| fault.in_policy(next, "")).collect()
}

#[cfg(test)]
mod tests {
    use api::cluster::{
        BeforeChangeStatus, ClusterChange, EtcdClusterStatus, PeerStage, TlsStatus,
    };
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use member::tls::{Purpose, Slot};

    use super::*;
    use crate::observe::tests::made_durable;

    fn policy(text: &str) -> Option<TlsPolicy> {
        serde_json::from_str(text).unwrap()
    }

    fn effective(wanted: &str, record: Option<&str>) -> (Objects, Effective) {
        let mut objects = made_durable();
        objects.cluster.spec.tls = policy(wanted);
        objects.started.record = record.map(|at| TlsStatus::new("token", policy(at).as_ref()));
        let effective = Effective::of(&objects, Timestamp::UNIX_EPOCH);
        (objects, effective)
    }

    const PEERS: &str = r#"{"static":{"member":{"peerSecret":"p"}}}"#;

    #[test]
    fn spec_in_effect_has_recorded_tls_settings_during_rollout() {
        let (objects, effective) = effective(PEERS, Some("null"));
        assert_eq!(effective.cluster().spec.tls, None);
        assert_eq!(objects.cluster.spec.tls, policy(PEERS));
        let next = effective.tls_rollout().next.as_ref().unwrap();
        assert_eq!(TlsMode::of(next.to.as_ref()).peers, PeerStage::PlainAndTls);
    }

    #[test]
    fn invariant_20_change_to_cert_manager_waits_for_certificates() {
        const ISSUED: &str = r#"{"certManager":{"issuerRef":{"name":"ca"},"client":false}}"#;
        let (mut objects, _) = effective(ISSUED, Some(PEERS));
        let fault = Fault {
            purpose: Purpose::Peer,
            code: FaultKind::IssuerMissing,
            message: "the Issuer ca does not exist".to_owned(),
        };
        objects.next_tls.peer = Some(Slot {
            secret: "db-peer-certs".to_owned(),
            found: Err(fault.clone()),
        });
        let effective = Effective::of(&objects, Timestamp::UNIX_EPOCH);
        assert_eq!(effective.cluster().spec.tls, policy(PEERS));
        let next = effective.tls_rollout().next.as_ref().unwrap();
        assert_eq!((&next.to, &next.faults), (&policy(ISSUED), &vec![fault]));
    }

    #[test]
    fn invariant_41_policy_in_effect_is_delete_only_after_backup_or_waiver() {
        let (mut objects, _) = effective(PEERS, None);
        let begin = Time(Timestamp::UNIX_EPOCH);
        let cluster = &mut objects.cluster;
        cluster.spec.deletion_policy = Some(ClusterDeletionPolicy::BackupThenDelete);
        cluster.metadata.deletion_timestamp = Some(begin.clone());
        for waived in [false, true] {
            let change = ClusterChange::Deletion;
            let record = BeforeChangeStatus {
                waived,
                ..BeforeChangeStatus::waiting(change, "ab".to_owned(), begin.clone())
            };
            objects.cluster.status = Some(EtcdClusterStatus {
                cluster_id: Some("ab".to_owned()),
                before_change: Some(record),
                ..EtcdClusterStatus::default()
            });
            let effective = Effective::of(&objects, Timestamp::UNIX_EPOCH);
            assert_eq!(effective.cluster().spec.retains_volumes(), !waived);
        }
    }

    #[test]
    fn new_cluster_uses_tls_settings_of_spec() {
        let (objects, effective) = effective(PEERS, None);
        assert_eq!(effective.cluster().spec, objects.cluster.spec);
        assert_eq!(effective.tls_rollout().next, None);
    }

    #[test]
    fn tls_stage_in_user_spec_is_ignored() {
        let (mut objects, _) = effective(PEERS, None);
        if let Some(tls) = &mut objects.cluster.spec.tls {
            tls.peer_stage = Some(PeerStage::TlsTwice);
        }
        let effective = Effective::of(&objects, Timestamp::UNIX_EPOCH);
        assert_eq!(effective.cluster().spec.tls, policy(PEERS));
    }
}
