//! The condition `Advisable`: settings and states that the operator accepts, but that endanger the cluster.

use std::collections::BTreeMap;

use api::EtcdClusterSpec;
use api::cluster::{Advice, MemberStatus, flag_of_env};
use api::conditions::{ConditionType, Finding};
use api::version::{EtcdVersion, Support};
use jiff::Timestamp;

use crate::quantity::in_words;
use crate::reason::Reason;
use crate::status::{Report, finding};

/// Share of the quota, in percent, above which a database counts as nearly full. The alert `EtcdQuotaNearlyFull` uses
/// the same share.
const NEARLY_FULL_PERCENT: i64 = 80;

const COMPACTION: &str = "auto-compaction-retention";

/// The condition `Advisable`. Its reason is the first piece of advice that `spec.silencedAdvice` does not name. Its
/// message contains all pieces of advice that this field does not name.
pub(super) fn advisable(report: &Report, members: &[MemberStatus], now: Timestamp) -> Finding {
    let kind = ConditionType::Advisable;
    let silenced = &report.cluster.spec.silenced_advice;
    let mut given = all(report, members, now);
    given.retain(|(reason, _)| !silenced.contains(&Advice::from(reason.as_str())));
    let Some((first, _)) = given.first() else {
        let text = if silenced.is_empty() {
            "the cluster follows all recommendations"
        } else {
            "the cluster follows all recommendations that spec.silencedAdvice does not name"
        };
        return finding(kind, true, Reason::AsAdvised, text);
    };
    let first = *first;
    let texts = given
        .into_iter()
        .map(|(reason, text)| format!("{}: {text}", reason.as_str()));
    finding(kind, false, first, texts.collect::<Vec<_>>().join("; "))
}

/// All advice, the most urgent first.
fn all(report: &Report, members: &[MemberStatus], now: Timestamp) -> Vec<(Reason, String)> {
    let spec = &report.cluster.spec;
    let all = [
        (Reason::QuotaNearlyFull, full(report, members)),
        (Reason::CertificateExpiring, expiring(report, now)),
        (Reason::UntestedVersion, untested(&report.desired.version)),
        (Reason::EvenSize, even(report.desired.size)),
        (Reason::NoVolumes, without_volumes(report)),
        (Reason::NoBackup, without_backup(report)),
        (Reason::SharedNode, shared_node(members)),
        (Reason::NoCompaction, without_compaction(spec)),
    ];
    let given = all.into_iter();
    given
        .filter_map(|(reason, text)| Some((reason, text?)))
        .collect()
}

fn full(report: &Report, members: &[MemberStatus]) -> Option<String> {
    let quota = report.desired.upkeep.quota;
    let size = |member: &MemberStatus| member.db_size;
    let largest = members.iter().max_by_key(|member| size(member))?;
    let percent = size(largest)?.saturating_mul(100) / quota.max(1);
    (percent >= NEARLY_FULL_PERCENT).then(|| {
        format!(
            "the database of {} uses {percent} % of its quota of {}: delete keys, compact and defragment, or increase spec.etcd.quotaBackendBytes",
            largest.name,
            in_words(u64::try_from(quota).unwrap_or_default())
        )
    })
}

fn expiring(report: &Report, now: Timestamp) -> Option<String> {
    let expiries = report.observed.certificates.expiries.iter();
    let near = expiries.filter(|expiry| !expiry.generated && expiry.stage(now).is_some());
    let first = near.min_by_key(|expiry| expiry.not_after)?;
    Some(format!(
        "the certificate {} in Secret {} expires at {}: renew it",
        first.key, first.secret, first.not_after
    ))
}

fn untested(version: &str) -> Option<String> {
    let parsed = EtcdVersion::parse(version).ok()?;
    (parsed.support() != Support::Tested).then(|| {
        let voters = if parsed.has_learners() {
            ""
        } else {
            ". Before 3.4, a new member is a voter at once, so the quorum grows before the member runs"
        };
        format!("spec.version {version} is not tested with this release of the operator: use 3.4 to 3.7{voters}")
    })
}

fn even(size: usize) -> Option<String> {
    (size.is_multiple_of(2)).then(|| {
        format!(
            "spec.size {size} tolerates no more lost members than spec.size {}: use an odd number",
            size.saturating_sub(1)
        )
    })
}

fn without_volumes(report: &Report) -> Option<String> {
    (!report.desired.durable).then(|| {
        "members have no volumes, and lose their data with their pods: set spec.pod.persistentVolumeClaimSpec".to_owned()
    })
}

fn without_backup(report: &Report) -> Option<String> {
    let status = report.cluster.status.as_ref();
    let has_backup = report.cluster.spec.backup.is_some()
        || status.is_some_and(|status| status.last_backup.is_some());
    (!has_backup).then(|| {
        "no backup of this cluster is known: set spec.backup, or create an EtcdBackup".to_owned()
    })
}

fn shared_node(members: &[MemberStatus]) -> Option<String> {
    let mut nodes: BTreeMap<&str, usize> = BTreeMap::new();
    for node in members.iter().filter_map(|member| member.node.as_deref()) {
        *nodes.entry(node).or_default() += 1;
    }
    let (node, count) = nodes.into_iter().find(|(_, count)| *count > 1)?;
    Some(format!(
        "{count} members run on node {node}, and fail together with it: set spec.pod.affinity"
    ))
}

fn without_compaction(spec: &EtcdClusterSpec) -> Option<String> {
    let typed = spec
        .etcd
        .as_ref()
        .is_some_and(|etcd| etcd.auto_compaction_retention.is_some());
    let pod = spec.pod.as_ref();
    let variable = pod.is_some_and(|pod| {
        let mut variables = pod.etcd_env.iter();
        variables.any(|variable| flag_of_env(&variable.name).as_deref() == Some(COMPACTION))
    });
    (!typed && !variable).then(|| {
        "etcd keeps all old revisions unless a client, such as kube-apiserver, compacts them: set \
         spec.etcd.autoCompactionRetention"
            .to_owned()
    })
}
