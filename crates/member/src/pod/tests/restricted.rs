//! Checks pods against the restricted pod security standard, for the fields that this crate sets.

use k8s_openapi::api::core::v1::{Container, Pod};

/// The violations of the restricted standard.
pub(super) fn violations(pod: &Pod) -> Vec<String> {
    let spec = pod.spec.as_ref().unwrap();
    let security = spec.security_context.clone().unwrap_or_default();
    let mut found = Vec::new();
    let mut check = |holds: bool, what: &str| {
        if !holds {
            found.push(what.to_owned());
        }
    };
    check(spec.host_network != Some(true), "host network");
    check(
        spec.host_pid != Some(true) && spec.host_ipc != Some(true),
        "host namespaces",
    );
    check(security.run_as_non_root == Some(true), "runAsNonRoot");
    check(security.run_as_user != Some(0), "runAsUser 0");
    let profile = security.seccomp_profile.map(|profile| profile.type_);
    check(
        profile.as_deref() == Some("RuntimeDefault"),
        "seccompProfile",
    );
    for volume in spec.volumes.iter().flatten() {
        let host = volume.host_path.is_some() || volume.nfs.is_some() || volume.iscsi.is_some();
        check(!host, &format!("volume {}", volume.name));
    }
    for container in spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
    {
        found.extend(container_violations(container));
    }
    found
}

fn container_violations(container: &Container) -> Vec<String> {
    let security = container.security_context.clone().unwrap_or_default();
    let capabilities = security.capabilities.unwrap_or_default();
    let checks = [
        (security.privileged != Some(true), "privileged"),
        (
            security.allow_privilege_escalation == Some(false),
            "allowPrivilegeEscalation",
        ),
        (
            capabilities.drop == Some(vec!["ALL".to_owned()]),
            "capabilities.drop",
        ),
        (capabilities.add.is_none(), "capabilities.add"),
        (
            container
                .ports
                .iter()
                .flatten()
                .all(|port| port.host_port.is_none()),
            "hostPort",
        ),
    ];
    checks
        .iter()
        .filter(|(holds, _)| !holds)
        .map(|(_, what)| format!("{}: {what}", container.name))
        .collect()
}
