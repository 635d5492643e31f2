//! The spec in effect: what the user wrote, with TLS as far as members have been brought to it, and completed by what
//! the TLS Secrets say. Pure; the object of the user stays as it was read.
//!
//! Builders, the planner and the comparison of objects with what they should be use the spec in effect. A user may
//! change `spec.TLS` in one step, and the members follow in several (invariant 23).

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use jiff::Timestamp;
use kube::ResourceExt;
use member::Members;
use member::tls::{ClusterTls, Fault, FaultKind};

use crate::objects::Objects;
use crate::switch::TlsRollout;

/// The spec in effect, and how far a change of TLS is.
#[derive(Clone, Debug)]
pub struct Effective {
    cluster: EtcdCluster,
    rollout: TlsRollout,
}

impl Effective {
    /// From what was read.
    pub fn of(objects: &Objects, now: Timestamp) -> Self {
        let mut cluster = objects.cluster.clone();
        let mut rollout = TlsRollout::of(&objects.started, cluster.spec.tls.as_ref());
        // A cluster that runs goes on with the way its members talk until they are brought to another.
        cluster.spec.tls.clone_from(&rollout.at);
        let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
        // A cluster that runs stays with its form of address, whatever its certificates cover by now.
        let form = objects.form.clone();
        let tls = &objects.tls;
        tls.complete_spec(&mut cluster.spec, (&namespace, &name), form);
        if let Some(next) = &mut rollout.next {
            next.faults = faults(&cluster, &objects.next_tls, next.to.as_ref(), now);
        }
        Self { cluster, rollout }
    }

    /// Of a cluster without members, which takes everything as its user wrote it.
    #[cfg(test)]
    pub(crate) fn as_written(cluster: EtcdCluster) -> Self {
        let started = crate::switch::Started::default();
        let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
        Self { cluster, rollout }
    }

    /// The object with the spec in effect.
    pub fn cluster(&self) -> &EtcdCluster {
        &self.cluster
    }

    /// How far a change of TLS is.
    pub fn tls_rollout(&self) -> &TlsRollout {
        &self.rollout
    }
}

/// Problems of the certificates for the next stage. The operator creates missing generated certificates in that stage.
fn faults(
    cluster: &EtcdCluster,
    held: &ClusterTls,
    next: Option<&TlsPolicy>,
    now: Timestamp,
) -> Vec<Fault> {
    let namespace = cluster.namespace().unwrap_or_default();
    let addresses = Members::of(cluster, &namespace, "", None).addresses();
    let generated = next.is_some_and(|tls| tls.generated.is_some());
    let mut faults = held.faults(&addresses, now);
    faults.retain(|fault| !(generated && fault.code == FaultKind::SecretMissing));
    faults
}

#[cfg(test)]
mod tests {
    use api::cluster::{PeerStage, TlsStatus};

    use super::*;
    use crate::observe::tests::made_durable;
    use crate::switch::Way;

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
    fn spec_in_effect_follows_the_rollout_and_the_object_stays_as_written() {
        let (objects, effective) = effective(PEERS, Some("null"));
        assert_eq!(effective.cluster().spec.tls, None);
        assert_eq!(objects.cluster.spec.tls, policy(PEERS));
        let next = effective.tls_rollout().next.as_ref().unwrap();
        assert_eq!(Way::of(next.to.as_ref()).peers, PeerStage::PlainAndTls);
    }

    #[test]
    fn new_cluster_takes_the_spec_as_written() {
        let (objects, effective) = effective(PEERS, None);
        assert_eq!(effective.cluster().spec, objects.cluster.spec);
        assert_eq!(effective.tls_rollout().next, None);
    }

    #[test]
    fn stage_in_the_spec_of_a_user_is_ignored() {
        let (mut objects, _) = effective(PEERS, None);
        if let Some(tls) = &mut objects.cluster.spec.tls {
            tls.peer_stage = Some(PeerStage::TlsTwice);
        }
        let effective = Effective::of(&objects, Timestamp::UNIX_EPOCH);
        assert_eq!(effective.cluster().spec.tls, policy(PEERS));
    }
}
