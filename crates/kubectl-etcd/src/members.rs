//! Reads the pods of members: finds etcd's flags, chooses the pod for a command, and builds etcdctl's command line.
//! Performs no I/O.

use api::names;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};
use kube::ResourceExt;

use crate::error::{Error, Result};

/// The value of the etcd flag `name` in a member's pod. Finds `--flag=value` and `--flag value` in the command and the
/// arguments of the container.
pub fn flag<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    let etcd = etcd_container(pod)?;
    let words: Vec<&str> = [&etcd.command, &etcd.args]
        .into_iter()
        .flatten()
        .flatten()
        // Each word of the command is split at white space, because coreos/etcd-operator starts etcd with a shell
        // script in one word.
        .flat_map(|word| word.split_whitespace())
        .collect();
    let with_value = format!("--{name}=");
    let alone = format!("--{name}");
    for (index, word) in words.iter().enumerate() {
        if let Some(value) = word.strip_prefix(&with_value) {
            return Some(value);
        }
        if *word == alone {
            return words.get(index + 1).copied();
        }
    }
    None
}

fn etcd_container(pod: &Pod) -> Option<&Container> {
    let containers = &pod.spec.as_ref()?.containers;
    containers
        .iter()
        .find(|one| one.name == names::CONTAINER_ETCD)
}

/// The first client URL in the etcd flags of the member's pod.
pub fn client_url(pod: &Pod) -> Option<&str> {
    flag(pod, "advertise-client-urls")?.split(',').next()
}

/// The status of the etcd container in the pod.
pub fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let all = pod.status.as_ref()?.container_statuses.as_ref()?;
    all.iter().find(|one| one.name == names::CONTAINER_ETCD)
}

/// Whether the etcd container runs, so that a command can run in it.
pub fn is_running(pod: &Pod) -> bool {
    let state = container(pod).and_then(|status| status.state.as_ref());
    state.is_some_and(|state| state.running.is_some())
}

/// Whether the etcd container is ready.
pub fn is_ready(pod: &Pod) -> bool {
    is_running(pod) && container(pod).is_some_and(|status| status.ready)
}

/// Whether the member is a voter. Commands prefer voters, because a learner rejects most client requests.
fn is_voter(pod: &Pod) -> bool {
    let role = pod
        .labels()
        .get(names::LABEL_ROLE)
        .map_or(names::ROLE_VOTER, String::as_str);
    role != names::ROLE_LEARNER
}

/// Chooses the pod in which a command runs: the pod of `member`. If `member` is `None`, chooses among the pods with a
/// running etcd container: first a ready voter, then a ready learner, then a pod that is not ready.
///
/// # Errors
/// Fails if the named member has no pod, or if no etcd container runs.
pub fn choose<'a>(cluster: &str, pods: &'a [Pod], member: Option<&str>) -> Result<&'a Pod> {
    if let Some(name) = member {
        let found = pods.iter().find(|pod| pod.name_any() == name);
        let pod = found.ok_or_else(|| Error::Missing {
            object: format!("the pod of member {name} of cluster {cluster}"),
            remedy: format!("members with pods: {}", listed(pods)),
        })?;
        if !is_running(pod) {
            return Err(not_running(
                cluster,
                &format!("the etcd container of member {name} does not run"),
            ));
        }
        return Ok(pod);
    }
    let rank = |pod: &&Pod| (is_ready(pod), is_voter(pod));
    let running = pods.iter().filter(|pod| is_running(pod));
    running.rev().max_by_key(rank).ok_or_else(|| {
        not_running(
            cluster,
            &format!("no etcd container of cluster {cluster} runs"),
        )
    })
}

fn not_running(cluster: &str, message: &str) -> Error {
    Error::refused(
        message,
        format!(
            "read the cause with `kubectl etcd plan {cluster}` and `kubectl etcd events {cluster}`"
        ),
    )
}

fn listed(pods: &[Pod]) -> String {
    if pods.is_empty() {
        return "none".to_owned();
    }
    let names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    names.join(", ")
}

/// The client URLs of all members with a pod, sorted and without duplicates.
pub fn endpoints(pods: &[Pod]) -> Vec<String> {
    let mut all: Vec<String> = pods
        .iter()
        .filter_map(client_url)
        .map(str::to_owned)
        .collect();
    all.sort();
    all.dedup();
    all
}

/// The command line of etcdctl in a member's container. `endpoints` and the certificates in the etcd flags of the pod
/// become options, unless `args` sets these options.
pub fn etcdctl(pod: &Pod, endpoints: &[String], args: &[String]) -> Vec<String> {
    let mut words = vec!["etcdctl".to_owned()];
    let given = |option: &str| {
        let with_value = format!("--{option}=");
        let alone = format!("--{option}");
        args.iter()
            .any(|arg| *arg == alone || arg.starts_with(&with_value))
    };
    let mut add = |option: &str, value: &str| {
        if !given(option) {
            words.push(format!("--{option}={value}"));
        }
    };
    if !endpoints.is_empty() {
        add("endpoints", &endpoints.join(","));
    }
    for (option, source) in [
        ("cacert", "trusted-ca-file"),
        ("cert", "cert-file"),
        ("key", "key-file"),
    ] {
        if let Some(path) = flag(pod, source) {
            add(option, path);
        }
    }
    words.extend(args.iter().cloned());
    words
}

/// Whether the etcdctl command accepts only one endpoint.
pub fn needs_one_endpoint(args: &[String]) -> bool {
    let words: Vec<&str> = args
        .iter()
        .map(String::as_str)
        .filter(|word| !word.starts_with('-'))
        .collect();
    matches!(words.as_slice(), ["snapshot", "save" | "pipe", ..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, role: &str, running: bool, ready: bool) -> Pod {
        let state = if running {
            serde_json::json!({ "running": {} })
        } else {
            serde_json::json!({ "waiting": { "reason": "CrashLoopBackOff" } })
        };
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": name, "labels": { "etcd.database.coreos.com/role": role } },
            "spec": { "containers": [
                { "name": "sidecar", "args": ["--cert-file=/wrong"] },
                { "name": "etcd", "command": ["/usr/local/bin/etcd"], "args": [
                    format!("--advertise-client-urls=https://{name}.prod.svc:2379"),
                    "--cert-file=/tls/server.crt", "--key-file=/tls/server.key",
                    "--trusted-ca-file=/tls/server-ca.crt"
                ] }
            ] },
            "status": { "containerStatuses": [{
                "name": "etcd", "ready": ready, "restartCount": 0, "image": "x", "imageID": "x",
                "state": state
            }] }
        }))
        .unwrap()
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn etcdctl_gets_endpoints_and_certificates_of_pod() {
        let pods = [pod("b", "voter", true, true), pod("a", "voter", true, true)];
        let command = etcdctl(&pods[0], &endpoints(&pods), &words("endpoint status"));
        assert_eq!(
            command,
            words(
                "etcdctl --endpoints=https://a.prod.svc:2379,https://b.prod.svc:2379 --cacert=/tls/server-ca.crt --cert=/tls/server.crt --key=/tls/server.key endpoint status"
            )
        );
    }

    #[test]
    fn etcdctl_options_of_user_take_precedence() {
        let pod = pod("a", "voter", true, true);
        let urls = endpoints(std::slice::from_ref(&pod));
        let command = etcdctl(
            &pod,
            &urls,
            &words("--endpoints=http://x:1 --cert /y get k"),
        );
        let of = |option: &str| {
            let all = command.iter();
            all.filter(|word| word.starts_with(option)).count()
        };
        assert_eq!((of("--endpoints"), of("--cert"), of("--key")), (1, 1, 1));
    }

    #[test]
    fn etcdctl_for_pod_without_tls_gets_no_certificates() {
        let plain: Pod = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "a" },
            "spec": { "containers": [{ "name": "etcd", "command": ["/bin/sh", "-ec",
                "/usr/local/bin/etcd --name a --advertise-client-urls http://a.x.svc:2379 --data-dir=/d"] }] }
        }))
        .unwrap();
        assert_eq!(client_url(&plain), Some("http://a.x.svc:2379"));
        let command = etcdctl(&plain, &endpoints(std::slice::from_ref(&plain)), &[]);
        assert_eq!(command, words("etcdctl --endpoints=http://a.x.svc:2379"));
    }

    #[test]
    fn ready_voter_is_chosen_before_learner_and_unready_pod() {
        let pods = [
            pod("a", "voter", false, false),
            pod("b", "learner", true, true),
            pod("c", "voter", true, false),
            pod("d", "voter", true, true),
            pod("e", "voter", true, true),
        ];
        let name = |pods: &[Pod], member| choose("main", pods, member).unwrap().name_any();
        assert_eq!(name(&pods, None), "d");
        assert_eq!(name(&pods[..3], None), "b");
        assert_eq!(name(&pods, Some("c")), "c");
    }

    #[test]
    fn missing_or_stopped_member_pod_is_reported() {
        let pods = [pod("a", "voter", false, false)];
        let error = choose("main", &pods, None).unwrap_err();
        assert!(error.to_string().contains("cluster main"), "{error}");
        assert!(error.remedy().unwrap().contains("kubectl etcd plan main"));
        let error = choose("main", &pods, Some("z")).unwrap_err();
        assert!(error.to_string().contains("member z"), "{error}");
        assert!(error.remedy().unwrap().ends_with(": a"));
        let error = choose("main", &pods, Some("a")).unwrap_err();
        assert!(error.to_string().contains("does not run"), "{error}");
    }

    #[test]
    fn etcdctl_snapshot_requires_single_endpoint() {
        assert!(needs_one_endpoint(&words("snapshot save /x")));
        assert!(needs_one_endpoint(&words("--debug snapshot save /x")));
        assert!(!needs_one_endpoint(&words("get snapshot")));
    }
}
