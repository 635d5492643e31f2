//! Damaged pods of coreos/etcd-operator and of this operator. Every reconcile reads the members' pods, and users can
//! edit the labels and annotations of pods.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

use api::EtcdClusterSpec;
use damaged::{assert_little_memory, bounded, cases, damaged};
use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;

/// A pod of coreos/etcd-operator v0.9.4 (`pkg/util/k8sutil/k8sutil.go`).
const COREOS: &str = r#"{"metadata":{"name":"db-7xwq2m4n6b","namespace":"prod","uid":"pod-b",
"creationTimestamp":"2018-12-31T23:59:59Z","annotations":{"etcd.version":"3.2.13"},
"labels":{"app":"etcd","etcd_node":"db-7xwq2m4n6b","etcd_cluster":"db"}},
"spec":{"hostname":"db-7xwq2m4n6b","subdomain":"db","restartPolicy":"Never","automountServiceAccountToken":false,
"nodeName":"node-1","initContainers":[{"name":"check-dns","image":"busybox:1.28.0-glibc","command":["/bin/sh","-c","true"]}],
"volumes":[{"name":"etcd-data","emptyDir":{}}],"containers":[{"name":"etcd","image":"quay.io/coreos/etcd:v3.2.13",
"command":["/usr/local/bin/etcd","--data-dir=/var/etcd/data","--name=db-7xwq2m4n6b",
"--initial-advertise-peer-urls=http://db-7xwq2m4n6b.db.prod.svc:2380","--listen-peer-urls=http://0.0.0.0:2380",
"--listen-client-urls=http://0.0.0.0:2379","--advertise-client-urls=http://db-7xwq2m4n6b.db.prod.svc:2379",
"--initial-cluster=db-5zc2k9fz8t=http://db-5zc2k9fz8t.db.prod.svc:2380,db-7xwq2m4n6b=http://db-7xwq2m4n6b.db.prod.svc:2380",
"--initial-cluster-state=existing"],"volumeMounts":[{"name":"etcd-data","mountPath":"/var/etcd"}],
"livenessProbe":{"exec":{"command":["/bin/sh","-ec","ETCDCTL_API=3 etcdctl endpoint status"]},"periodSeconds":60}}]},
"status":{"phase":"Running","podIP":"10.0.0.7","containerStatuses":[{"name":"etcd","image":"","imageID":"",
"ready":true,"restartCount":1,"state":{"running":{"startedAt":"2026-11-21T00:00:00Z"}},"lastState":{"terminated":
{"exitCode":137,"reason":"OOMKilled","message":"panic: tocommit(11) is out of range [lastIndex(8)]",
"startedAt":"2026-11-20T00:00:00Z","finishedAt":"2026-11-20T23:00:00Z"}}}]}}"#;

/// A member's pod of this operator. The kubelet of its node has been silent for minutes.
const LOST: &str = r#"{"metadata":{"name":"db-aaaaaaaaaa","namespace":"prod","uid":"pod-a",
"creationTimestamp":"2026-11-20T00:00:00Z","deletionTimestamp":"2026-11-21T00:15:30Z","deletionGracePeriodSeconds":30,
"annotations":{"etcd.database.coreos.com/cluster-id":"14841639068965178418","etcd.version":"3.6.16"},
"labels":{"app":"etcd","etcd_node":"db-aaaaaaaaaa","etcd_cluster":"db","etcd_role":"voter"}},
"spec":{"nodeName":"node-2","containers":[{"name":"etcd","image":"quay.io/coreos/etcd:v3.6.16","args":[]}]},
"status":{"phase":"Running","conditions":[{"type":"Ready","status":"False","reason":"NodeNotReady",
"lastTransitionTime":"2026-11-21T00:10:00Z"},{"type":"ContainersReady","status":"True",
"lastTransitionTime":"2026-11-21T00:01:00Z"},{"type":"DisruptionTarget","status":"True",
"reason":"DeletionByTaintManager","lastTransitionTime":"2026-11-21T00:15:00Z"}],
"containerStatuses":[{"name":"etcd","image":"","imageID":"","ready":false,"restartCount":9,"state":{"waiting":
{"reason":"ErrImagePull","message":"failed: read udp 10.0.0.2:5969->10.0.0.1:53: i/o timeout"}}}]}}"#;

#[test]
fn undamaged_sample_pods_are_read() {
    for text in [COREOS, LOST] {
        let pod: Pod = serde_json::from_str(text).unwrap();
        let read = cluster::observe::pod(&pod, &EtcdClusterSpec::default(), true);
        assert!(!read.uid.is_empty());
    }
}

proptest! {
    #![proptest_config(cases(512))]

    #[test]
    fn damaged_pods_are_read_without_panic_or_much_memory(text in damaged(&[COREOS.as_bytes(), LOST.as_bytes()]), owned in any::<bool>()) {
        if let Ok(pod) = bounded(|| serde_json::from_slice::<Pod>(&text)) {
            let spec = EtcdClusterSpec::default();
            let read = bounded(|| cluster::observe::pod(&pod, &spec, owned));
            // Two reads of the same pod must give the same result, because a difference would make the operator
            // reconcile an idle cluster forever.
            prop_assert_eq!(format!("{read:?}"), format!("{:?}", cluster::observe::pod(&pod, &spec, owned)));
        }
        assert_little_memory();
    }
}
