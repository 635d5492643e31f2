//! Validates an `EtcdCluster`. Performs no I/O.

use std::collections::BTreeSet;

use super::flags::{flag_of_env, refused_argument, refused_variable};
use super::pod::PodPolicy;
use super::{
    BEFORE_CHANGES, BootstrapMode, ClusterChange, ClusterDeletionPolicy, EtcdCluster,
    EtcdClusterSpec, EtcdOptions, GeneratedTls, MAX_SIZE, MIN_SIZE, MemberAddress, RecoveryPolicy,
};
use crate::backup::copy_problems;
use crate::names::{is_reserved_annotation, is_reserved_label};
use crate::problem::{Problem, names_of_set};
use crate::storage::{StorageBlock, StorageType};
use crate::version::{DEFAULT_REPOSITORY, EtcdVersion};

/// The minimum validity of a generated certificate. The operator renews a certificate in the last third of its
/// validity, and members need time to read the new certificate.
const SHORTEST_CERTIFICATE: std::time::Duration = std::time::Duration::from_mins(3);

/// The problems of the object. The schema rejects such objects, but an object may be older than the schema.
pub fn validate(cluster: &EtcdCluster) -> Vec<Problem> {
    let name = cluster.metadata.name.as_deref().unwrap_or_default();
    let mut problems = Vec::new();
    problems.extend(Problem::invalid_cluster_name("metadata.name", name));
    problems.extend(validate_spec(&cluster.spec));
    problems.extend(super::join::join_problem(cluster));
    problems.extend(super::grpc_proxy::grpc_proxy_problems(cluster));
    problems
}

/// The problems of the spec of an EtcdCluster, or of the template in an EtcdRestore.
pub(crate) fn validate_spec(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let mut problems = Vec::new();
    if !(MIN_SIZE..=MAX_SIZE).contains(&spec.size) {
        let remedy = format!("use {MIN_SIZE} to {MAX_SIZE}, usually 3 or 5");
        problems.push(Problem::new(
            "spec.size",
            format!("is {}", spec.size),
            remedy,
        ));
    }
    if EtcdVersion::parse(&spec.version).is_err() {
        let problem = format!("is {:?}, which is not a version", spec.version);
        problems.push(Problem::new(
            "spec.version",
            problem,
            "use major, minor and patch number, such as 3.7.3",
        ));
    }
    problems.extend(image_problem(spec));
    if let BootstrapMode::Unknown(text) = &spec.bootstrap {
        problems.push(Problem::unknown(
            "spec.bootstrap",
            text,
            BootstrapMode::KNOWN,
        ));
    }
    if let Some(MemberAddress::Unknown(text)) = &spec.member_address {
        problems.push(Problem::unknown(
            "spec.memberAddress",
            text,
            MemberAddress::KNOWN,
        ));
    }
    if spec.hibernate && !spec.is_durable() {
        problems.push(Problem::new(
            "spec.hibernate",
            "would lose the data of members without volumes",
            "set spec.pod.persistentVolumeClaimSpec or remove spec.hibernate",
        ));
    }
    problems.extend(deletion_problem(spec));
    problems.extend(tls_problems(spec));
    problems.extend(spec.pod.iter().flat_map(pod_problems));
    problems.extend(environment_problems(spec));
    let after = spec
        .member_replacement
        .as_ref()
        .and_then(|replacement| replacement.after.as_ref());
    problems.extend(Problem::invalid_duration(
        "spec.memberReplacement.after",
        after,
    ));
    let keep = spec
        .member_replacement
        .as_ref()
        .and_then(|replacement| replacement.keep_volumes.as_ref());
    problems.extend(Problem::invalid_duration(
        "spec.memberReplacement.keepVolumes",
        keep,
    ));
    problems.extend(recovery_problems(spec));
    problems.extend(backup_problems(spec));
    problems
}

fn image_problem(spec: &EtcdClusterSpec) -> Option<Problem> {
    const FIELD: &str = "spec.image";
    let image = spec.image.as_deref()?;
    if !has_digest(image) {
        return Some(Problem::new(
            FIELD,
            format!("is {image:?}, which does not end with a digest"),
            "use NAME@sha256:DIGEST or NAME:TAG@sha256:DIGEST",
        ));
    }
    (spec.repository != DEFAULT_REPOSITORY).then(|| {
        Problem::new(
            FIELD,
            "is set together with spec.repository",
            "remove spec.repository or spec.image",
        )
    })
}

/// True if the image has a name and ends with a SHA-256 digest.
fn has_digest(image: &str) -> bool {
    let Some((name, digest)) = image.split_once("@sha256:") else {
        return false;
    };
    let is_of_name =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | ':' | '/' | '-');
    let is_of_digest = |c: char| c.is_ascii_digit() || matches!(c, 'a'..='f');
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_of_name)
        && digest.len() == 64
        && digest.chars().all(is_of_digest)
}

fn deletion_problem(spec: &EtcdClusterSpec) -> Option<Problem> {
    const FIELD: &str = "spec.deletionPolicy";
    match &spec.deletion_policy {
        Some(ClusterDeletionPolicy::Unknown(text)) => {
            Some(Problem::unknown(FIELD, text, ClusterDeletionPolicy::KNOWN))
        }
        Some(ClusterDeletionPolicy::RetainVolumes) if !spec.is_durable() => Some(Problem::new(
            FIELD,
            "is RetainVolumes, but the members have no volumes",
            "set spec.pod.persistentVolumeClaimSpec or remove spec.deletionPolicy",
        )),
        Some(ClusterDeletionPolicy::BackupThenDelete) if spec.backup.is_none() => {
            Some(Problem::new(
                FIELD,
                "is BackupThenDelete, but no store for the backup is set",
                "set spec.backup or remove spec.deletionPolicy",
            ))
        }
        _ => None,
    }
}

fn recovery_problems(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let Some(recovery) = &spec.recovery else {
        return Vec::new();
    };
    let after = recovery.after.as_ref();
    let keep = recovery.keep_volumes.as_ref();
    let mut problems: Vec<Problem> = Problem::invalid_duration("spec.recovery.after", after)
        .into_iter()
        .chain(Problem::invalid_duration("spec.recovery.keepVolumes", keep))
        .collect();
    if let Some(RecoveryPolicy::Unknown(text)) = &recovery.policy {
        problems.push(Problem::unknown(
            "spec.recovery.policy",
            text,
            RecoveryPolicy::KNOWN,
        ));
    }
    problems
}

fn tls_problems(spec: &EtcdClusterSpec) -> Option<Problem> {
    let tls = spec.tls.as_ref()?;
    let sources = [
        (tls.static_.is_some(), "static"),
        (tls.generated.is_some(), "generated"),
        (tls.cert_manager.is_some(), "certManager"),
    ];
    let sources = names_of_set(sources);
    if sources.len() > 1 {
        return Some(Problem::new(
            "spec.TLS",
            format!("has {}", sources.join(" and ")),
            "set only one of these fields",
        ));
    }
    if let Some(generated) = &tls.generated {
        return generated_tls_problem(generated);
    }
    if let Some(issued) = &tls.cert_manager {
        return issued.problem();
    }
    match (tls.operator_secret(), tls.server_secret()) {
        (Some(_), None) => Some(Problem::new(
            "spec.TLS.static.operatorSecret",
            "is set without spec.TLS.static.member.serverSecret",
            "set both or neither",
        )),
        (None, Some(_)) => Some(Problem::new(
            "spec.TLS.static.member.serverSecret",
            "is set without spec.TLS.static.operatorSecret, which the operator needs to connect to the cluster",
            "set both or neither",
        )),
        _ => None,
    }
}

fn generated_tls_problem(generated: &GeneratedTls) -> Option<Problem> {
    let durations = [
        (
            "spec.TLS.generated.certificateDuration",
            &generated.certificate_duration,
        ),
        (
            "spec.TLS.generated.authorityDuration",
            &generated.authority_duration,
        ),
    ];
    for (field, text) in durations {
        let problem = Problem::invalid_duration(field, text.as_ref());
        if problem.is_some() {
            return problem;
        }
    }
    if generated.certificate_duration() < SHORTEST_CERTIFICATE {
        return Some(Problem::new(
            "spec.TLS.generated.certificateDuration",
            "is too short for a renewal in time",
            "use at least 3m, usually some weeks",
        ));
    }
    (generated.authority_duration() < generated.certificate_duration()).then(|| {
        Problem::new(
            "spec.TLS.generated.authorityDuration",
            "is shorter than spec.TLS.generated.certificateDuration, but a certificate cannot be valid longer than its CA",
            "use a longer duration for the CA than for the certificates",
        )
    })
}

fn pod_problems(pod: &PodPolicy) -> Vec<Problem> {
    let mut problems = Vec::new();
    for key in pod.labels.keys().filter(|key| is_reserved_label(key)) {
        problems.push(Problem::new(
            "spec.pod.labels",
            format!("has the key {key}, which the operator reserves"),
            "choose another key",
        ));
    }
    for key in pod
        .annotations
        .keys()
        .filter(|key| is_reserved_annotation(key))
    {
        problems.push(Problem::new(
            "spec.pod.annotations",
            format!("has the key {key}, which the operator reserves"),
            "choose another key",
        ));
    }
    for argument in &pod.extra_args {
        if let Some(remedy) = refused_argument(argument) {
            problems.push(Problem::new(
                "spec.pod.extraArgs",
                format!("has the item {argument:?}"),
                remedy,
            ));
        }
    }
    let claim = pod.persistent_volume_claim_spec.as_ref();
    let sized = claim.is_none_or(|claim| {
        let requests = claim
            .resources
            .as_ref()
            .and_then(|resources| resources.requests.as_ref());
        requests.is_some_and(|requests| requests.contains_key("storage"))
    });
    if !sized {
        problems.push(Problem::new(
            "spec.pod.persistentVolumeClaimSpec",
            "has no volume size",
            "set resources.requests.storage",
        ));
    }
    problems
}

/// The problems of variables that set a flag which the operator sets, or an option that `spec.etcd` also sets. The
/// messages do not contain values of variables.
fn environment_problems(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let options = spec.etcd.as_ref().map(EtcdOptions::flags);
    let options = options.unwrap_or_default();
    let variables = spec.pod.iter().flat_map(|pod| &pod.etcd_env);
    let names: BTreeSet<&str> = variables.map(|variable| variable.name.as_str()).collect();
    let mut problems = Vec::new();
    for name in names {
        let Some(flag) = flag_of_env(name) else {
            continue;
        };
        let field = "spec.pod.etcdEnv";
        let typed = options.iter().find(|option| option.flag == flag);
        if let Some(remedy) = refused_variable(name) {
            let problem = format!("has the variable {name}, which sets etcd's flag --{flag}");
            problems.push(Problem::new(field, problem, remedy));
        } else if let Some(option) = typed {
            let option = option.field;
            let problem = format!("has the variable {name}, but spec.etcd.{option} is set too");
            problems.push(Problem::new(field, problem, "remove the variable"));
        }
    }
    problems
}

fn backup_problems(spec: &EtcdClusterSpec) -> Vec<Problem> {
    let Some(backup) = &spec.backup else {
        return Vec::new();
    };
    let mut problems = backup
        .blocks()
        .problems(&backup.storage_type, "spec.backup", "storageType");
    problems.extend(backup.backup_policy.problems("spec.backup.backupPolicy"));
    problems.extend(
        backup
            .encryption
            .iter()
            .flat_map(|block| block.problems("spec.backup.encryption")),
    );
    problems.extend(
        backup
            .verification
            .iter()
            .flat_map(|block| block.problems("spec.backup.verification", &backup.storage_type)),
    );
    let blocks = backup.blocks();
    let first = blocks.select(&backup.storage_type, "spec.backup", "storageType");
    let first = first.ok().map(StorageBlock::from);
    problems.extend(copy_problems(&backup.copy_to, "spec.backup.copyTo", first));
    let changes = backup.before_changes.iter();
    let others = changes.map(ClusterChange::as_str);
    let others = others.filter(|change| !BEFORE_CHANGES.contains(change));
    problems.extend(
        others.map(|change| Problem::unknown("spec.backup.beforeChanges", change, BEFORE_CHANGES)),
    );
    let age = backup.before_changes_max_age.as_ref();
    let field = "spec.backup.beforeChangesMaxAge";
    problems.extend(Problem::invalid_duration(field, age));
    if age.is_some() && backup.before_changes.is_empty() {
        problems.push(Problem::new(
            field,
            "is set without spec.backup.beforeChanges",
            "set spec.backup.beforeChanges or remove beforeChangesMaxAge",
        ));
    }
    problems
}

/// The fields of the spec that have no effect.
pub fn not_in_effect(spec: &EtcdClusterSpec) -> Vec<String> {
    let Some(pod) = &spec.pod else {
        return Vec::new();
    };
    let timeout = pod.dns_timeout_in_second.unwrap_or_default();
    let image = pod.busybox_image.as_deref().unwrap_or_default();
    names_of_set([
        (timeout != 0, "spec.pod.DNSTimeoutInSecond"),
        (!image.is_empty(), "spec.pod.busyboxImage"),
    ])
}

/// The problems of fields that this release does not support, but must not ignore. If such a field were set, the
/// operator would start no member.
pub fn unsafe_to_ignore(spec: &EtcdClusterSpec) -> Vec<Problem> {
    // The list is empty, because this release has no such field.
    let _ = spec;
    Vec::new()
}

/// True if a restore can read from this type of store.
pub(crate) fn can_restore_from(storage_type: &StorageType) -> bool {
    *storage_type != StorageType::Local
}

#[cfg(test)]
mod tests;
