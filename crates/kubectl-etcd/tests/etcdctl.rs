//! Tests that the plugin can parse the output of a real etcdctl.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::process::Command;

use etcd::testing::{EtcdProcess, Programs, Start, built};
use k8s_openapi::api::core::v1::Pod;
use kubectl_etcd::{live, members};

/// Runs the etcdctl of a minor release with the plugin's arguments for the container of a member.
fn etcdctl(minor: &str, endpoints: &[String], args: &[&str]) -> std::process::Output {
    let program = built(&format!("etcd-{minor}-"), "etcdctl");
    let program = program.expect("etcdctl is not built: run `cargo xtask testbed build`");
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    let words = members::etcdctl(&Pod::default(), endpoints, &args);
    Command::new(program).args(&words[1..]).output().unwrap()
}

const STATUS: [&str; 4] = [
    "endpoint",
    "status",
    "--write-out=json",
    "--command-timeout=3s",
];

#[tokio::test]
async fn etcdctl_answers_of_each_minor_release_are_parsed() {
    for minor in ["3.5", "3.6", "3.7"] {
        let members =
            EtcdProcess::start_cluster(&Programs::find(minor), 3, &Start::default()).await;
        let mut endpoints: Vec<String> = members
            .iter()
            .map(|member| member.client_url.clone())
            .collect();
        let output = etcdctl(minor, &endpoints, &STATUS);
        let answers = live::parse(&String::from_utf8(output.stdout).unwrap()).unwrap();
        assert_eq!(answers.len(), 3, "{minor}: {answers:?}");
        let leaders = answers.iter().filter(|answer| answer.id == answer.leader);
        assert_eq!(leaders.count(), 1, "{minor}: {answers:?}");
        for answer in &answers {
            assert!(answer.version.starts_with(minor), "{minor}: {answer:?}");
            assert!(
                answer.revision >= 1 && answer.term >= 1 && answer.db_size > 0,
                "{minor}: {answer:?}"
            );
            assert!(
                answer.raft_index > 0 && !answer.is_learner && endpoints.contains(&answer.endpoint)
            );
            // Only etcd 3.6 and later report the quota.
            assert_eq!(
                answer.quota.is_some(),
                minor != "3.5",
                "{minor}: {answer:?}"
            );
        }

        // No etcd listens at this endpoint, so etcdctl fails, and the answers contain only the three members.
        endpoints.push("http://127.0.0.1:1".to_owned());
        let output = etcdctl(minor, &endpoints, &STATUS);
        assert!(!output.status.success());
        let answers = live::parse(&String::from_utf8(output.stdout).unwrap()).unwrap();
        assert_eq!(answers.len(), 3, "{minor}: {answers:?}");
    }
}

#[tokio::test]
async fn upkeep_commands_exist_in_etcdctl_of_each_minor_release() {
    for minor in ["3.5", "3.6", "3.7"] {
        let members =
            EtcdProcess::start_cluster(&Programs::find(minor), 3, &Start::default()).await;
        let endpoints: Vec<String> = members
            .iter()
            .map(|member| member.client_url.clone())
            .collect();
        let ok = |endpoints: &[String], args: &[&str]| {
            let output = etcdctl(minor, endpoints, args);
            assert!(output.status.success(), "{minor} {args:?}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        for value in ["a", "b", "c"] {
            ok(&endpoints, &["put", "k", value]);
        }
        ok(
            &endpoints[..1],
            &["compaction", "3", "--command-timeout=25s"],
        );
        ok(&endpoints[..1], &["defrag", "--command-timeout=29m"]);
        let answers = live::parse(&ok(&endpoints, &STATUS)).unwrap();
        let leader = answers
            .iter()
            .find(|answer| answer.id == answer.leader)
            .unwrap();
        let other = answers
            .iter()
            .find(|answer| answer.id != answer.leader)
            .unwrap();
        ok(
            std::slice::from_ref(&leader.endpoint),
            &["move-leader", &other.id],
        );
        let answers = live::parse(&ok(&endpoints, &STATUS)).unwrap();
        assert!(
            answers.iter().all(|answer| answer.leader == other.id),
            "{minor}: {answers:?}"
        );
    }
}
