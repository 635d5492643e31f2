//! The control plane and the daemons that all nodes share: etcd, API server, controller manager, scheduler,
//! kube-proxy, DNS, object stores.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::prelude::{BASE64_STANDARD, Engine as _};

use super::inside::Daemon;
use super::pki::Authority;
use super::{Dns, Testbed, group_of, pki};
use crate::checkout;

pub(crate) mod stores;

/// The daemons of the control plane, in the order of their start.
pub(crate) const DAEMONS: &[&str] = &[
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "coredns",
    "versitygw",
    "fake-gcs-server",
    "azurite",
];

const API_PORT: u16 = 6443;
const DNS_READY_PORT: u16 = 8181;
/// The last byte of the API server's IP address in the Service network. The next constant is the last byte for DNS.
const API_SERVICE: u8 = 1;
const DNS_SERVICE: u8 = 10;

/// Creates the keys and certificates of the control plane, and a kubeconfig for each client of the API server.
pub(crate) fn certificates(testbed: &Testbed) -> Result<()> {
    let folder = testbed.run_folder.join("pki");
    let of = testbed.state.addresses();
    let authority = Authority::new(&folder)?;
    let names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
    ];
    let addresses = [
        of.gateway(),
        of.service(API_SERVICE),
        std::net::Ipv4Addr::LOCALHOST.into(),
        std::net::Ipv6Addr::LOCALHOST.into(),
    ];
    authority.server("apiserver", &names, &addresses)?;
    authority.client("apiserver-kubelet", "kube-apiserver", &["system:masters"])?;
    authority.client("front-proxy", "front-proxy", &[])?;
    pki::key_pair(&folder, "sa")?;
    authority.client("admin", "admin", &["system:masters"])?;
    kubeconfig(testbed, "admin", "kubeconfig")?;
    for (name, user) in [
        ("kube-controller-manager", "system:kube-controller-manager"),
        ("kube-scheduler", "system:kube-scheduler"),
        ("kube-proxy", "system:kube-proxy"),
        ("coredns", "system:coredns"),
    ] {
        authority.client(name, user, &[])?;
        kubeconfig(testbed, name, &format!("{name}.kubeconfig"))?;
    }
    for index in 0..testbed.state.nodes {
        let name = format!("node-{index}");
        authority.client(&name, &format!("system:node:{name}"), &["system:nodes"])?;
        kubeconfig(testbed, &name, &format!("{name}.kubeconfig"))?;
    }
    Ok(())
}

/// Writes a kubeconfig that contains the certificate and key instead of their paths, so that the file can be copied
/// elsewhere.
fn kubeconfig(testbed: &Testbed, name: &str, file: &str) -> Result<()> {
    let pki = testbed.run_folder.join("pki");
    let data = |file: String| -> Result<String> {
        let path = pki.join(file);
        Ok(BASE64_STANDARD.encode(fs::read(&path).with_context(|| path.display().to_string())?))
    };
    let text = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "testbed", "cluster": {
            "server": testbed.state.addresses().url("https", API_PORT),
            "certificate-authority-data": data("ca.crt".into())?,
        }}],
        "users": [{ "name": name, "user": {
            "client-certificate-data": data(format!("{name}.crt"))?,
            "client-key-data": data(format!("{name}.key"))?,
        }}],
        "contexts": [{ "name": "testbed", "context": { "cluster": "testbed", "user": name } }],
        "current-context": "testbed",
    });
    let path = testbed.run_folder.join(file);
    fs::write(&path, serde_json::to_string_pretty(&text)?)
        .with_context(|| path.display().to_string())
}

/// Starts etcd and the API server.
pub(crate) fn start_api(testbed: &Testbed) -> Result<()> {
    start_etcd(testbed)?;
    start_api_server(testbed)
}

fn start_etcd(testbed: &Testbed) -> Result<()> {
    let etcd = testbed.programs.etcd.display().to_string();
    // `--unsafe-no-fsync` makes etcd faster. The data of this etcd need not survive a crash of the machine.
    start(
        testbed,
        "etcd",
        &etcd,
        "--data-dir=${RUN}/etcd
         --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379
         --listen-peer-urls=http://127.0.0.1:2380 --initial-advertise-peer-urls=http://127.0.0.1:2380
         --initial-cluster=default=http://127.0.0.1:2380
         --unsafe-no-fsync --log-level=warn --quota-backend-bytes=4294967296
         --auto-compaction-mode=periodic --auto-compaction-retention=5m",
    )
}

fn start_api_server(testbed: &Testbed) -> Result<()> {
    let addresses = testbed.state.addresses();
    start(
        testbed,
        "kube-apiserver",
        "kube-apiserver",
        &format!(
            "--etcd-servers=http://127.0.0.1:2379
             --bind-address={all} --secure-port={API_PORT} --advertise-address={gateway}
             --service-cluster-ip-range={services}
             --allow-privileged=true --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction
             --kubelet-preferred-address-types=InternalIP
             --tls-cert-file=${{RUN}}/pki/apiserver.crt --tls-private-key-file=${{RUN}}/pki/apiserver.key
             --client-ca-file=${{RUN}}/pki/ca.crt
             --service-account-key-file=${{RUN}}/pki/sa.pub --service-account-signing-key-file=${{RUN}}/pki/sa.key
             --service-account-issuer=https://kubernetes.default.svc.cluster.local
             --kubelet-client-certificate=${{RUN}}/pki/apiserver-kubelet.crt
             --kubelet-client-key=${{RUN}}/pki/apiserver-kubelet.key
             --requestheader-client-ca-file=${{RUN}}/pki/ca.crt --requestheader-allowed-names=front-proxy
             --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group
             --requestheader-extra-headers-prefix=X-Remote-Extra-
             --proxy-client-cert-file=${{RUN}}/pki/front-proxy.crt --proxy-client-key-file=${{RUN}}/pki/front-proxy.key
             --shutdown-delay-duration=0s",
            all = addresses.unspecified(),
            gateway = addresses.gateway(),
            services = addresses.services_network(),
        ),
    )
}

/// Starts the object stores and all clients of the API server.
pub(crate) fn start_rest(testbed: &Testbed) -> Result<()> {
    start_controller_manager(testbed)?;
    start_scheduler(testbed)?;
    start_proxy(testbed)?;
    start_dns(testbed)?;
    stores::start_s3(testbed)?;
    stores::start_gcs(testbed)?;
    stores::start_azurite(testbed)
}

fn start_controller_manager(testbed: &Testbed) -> Result<()> {
    start(
        testbed,
        "kube-controller-manager",
        "kube-controller-manager",
        &format!(
            "--kubeconfig=${{RUN}}/kube-controller-manager.kubeconfig --leader-elect=false
             --service-account-private-key-file=${{RUN}}/pki/sa.key --root-ca-file=${{RUN}}/pki/ca.crt
             --use-service-account-credentials=true
             --cluster-signing-cert-file=${{RUN}}/pki/ca.crt --cluster-signing-key-file=${{RUN}}/pki/ca.key
             --enable-hostpath-provisioner=true --node-monitor-period=2s --node-monitor-grace-period={NODE_GRACE}"
        ),
    )
}

fn start_scheduler(testbed: &Testbed) -> Result<()> {
    start(
        testbed,
        "kube-scheduler",
        "kube-scheduler",
        "--kubeconfig=${RUN}/kube-scheduler.kubeconfig --leader-elect=false",
    )
}

fn start_proxy(testbed: &Testbed) -> Result<()> {
    let addresses = testbed.state.addresses();
    let filter = addresses.family.bridge_filter();
    let bridged = testbed
        .inside
        .script(&format!("cat {filter} 2>/dev/null || echo 0"))?;
    let config = serde_json::json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": { "kubeconfig": testbed.run_folder.join("kube-proxy.kubeconfig") },
        "mode": "iptables",
        "clusterCIDR": addresses.pods_network(),
        "hostnameOverride": "node-0",
        "conntrack": { "maxPerCore": 0 },
        "nodePortAddresses": ["primary"],
        // `minSyncPeriod`: kube-proxy applies changes of Services almost at once. The default of one second would be
        // added to every measurement that waits for a Service. The value 0 would select this default.
        //
        // `masqueradeAll` is set if br_netfilter is off. All pods share a bridge, so without br_netfilter a response of
        // a pod to another pod would not pass the address translation of the Service.
        "iptables": { "masqueradeAll": bridged.trim() != "1", "minSyncPeriod": "10ms" },
    });
    fs::write(
        testbed.run_folder.join("kube-proxy.json"),
        config.to_string(),
    )
    .context("kube-proxy.json")?;
    start(
        testbed,
        "kube-proxy",
        "kube-proxy",
        "--config=${RUN}/kube-proxy.json",
    )
}

pub(crate) fn stop_daemon(testbed: &Testbed, name: &str) -> Result<()> {
    testbed.cgroups.kill(&group_of(&format!("control/{name}")))
}

pub(crate) fn daemon_runs(testbed: &Testbed, name: &str) -> bool {
    let group = group_of(&format!("control/{name}"));
    !testbed.cgroups.processes(&group).is_empty()
}

/// Starts a stopped daemon with its usual configuration.
pub(crate) fn start_daemon(testbed: &Testbed, name: &str) -> Result<()> {
    match name {
        "etcd" => start_etcd(testbed),
        "kube-apiserver" => start_api_server(testbed),
        "kube-controller-manager" => start_controller_manager(testbed),
        "kube-scheduler" => start_scheduler(testbed),
        "kube-proxy" => start_proxy(testbed),
        "coredns" => start_dns(testbed),
        "versitygw" => stores::start_s3(testbed),
        "fake-gcs-server" => stores::start_gcs(testbed),
        "azurite" => stores::start_azurite(testbed),
        _ => bail!("unknown daemon {name}: use one of {}", DAEMONS.join(", ")),
    }
}

/// Restarts the clients of the API server after an outage. In other clusters, the kubelet restarts them, because they
/// lose their lease or fail their liveness probe. Without a restart, their watches may deliver no events for minutes,
/// and the scheduler then exits ("scheduler cache is corrupted").
pub(crate) fn restart_clients(testbed: &Testbed) -> Result<()> {
    for name in [
        "kube-controller-manager",
        "kube-scheduler",
        "kube-proxy",
        "coredns",
    ] {
        stop_daemon(testbed, name)?;
        start_daemon(testbed, name)?;
    }
    Ok(())
}

/// Kubernetes treats a node as lost if the node does not update its status for this time. The default of Kubernetes is
/// 50 s.
const NODE_GRACE: &str = "20s";

fn start_dns(testbed: &Testbed) -> Result<()> {
    let file = match testbed.state.dns {
        Dns::Nocache => "Corefile.nocache",
        Dns::Cache30 => "Corefile.cache30",
    };
    let text = filled(testbed, &template(file)?);
    fs::write(testbed.run_folder.join("Corefile"), text).context("Corefile")?;
    start(testbed, "coredns", "coredns", "-conf=${RUN}/Corefile")
}

/// Restarts DNS with the cache setting in the state file. This empties the cache.
pub(crate) fn restart_dns(testbed: &Testbed) -> Result<()> {
    testbed.cgroups.kill(&group_of("control/coredns"))?;
    start_dns(testbed)?;
    wait_services(testbed)
}

/// Applies the objects that kubeadm and a cloud provider create in other clusters.
pub(crate) fn apply_addons(testbed: &Testbed) -> Result<()> {
    let file = testbed.run_folder.join("addons.yaml");
    fs::write(&file, filled(testbed, &template("addons.yaml")?)).context("addons.yaml")?;
    // The request is repeated, because shortly after its start the API server may still lack its IP address ranges
    // and roles, and then rejects the objects.
    let mut last = Ok(String::new());
    let path = file.display().to_string();
    let applied = testbed.wait_for("the addons", Duration::from_secs(30), || {
        last = testbed.kubectl(&["apply", "--server-side", "-f", &path]);
        last.is_ok()
    });
    applied.map_err(|error| match last {
        Err(cause) => cause.context(format!("{error:#}")),
        Ok(_) => error,
    })
}

/// Waits until DNS and the object stores answer.
pub(crate) fn wait_services(testbed: &Testbed) -> Result<()> {
    let gateway = testbed.state.addresses().gateway();
    let answers = |port: u16| {
        TcpStream::connect_timeout(&SocketAddr::new(gateway, port), Duration::from_secs(1)).is_ok()
    };
    stores::wait(testbed)?;
    testbed.wait_for("DNS (logs/coredns.log)", Duration::from_secs(30), || {
        answers(53) && is_ready(gateway)
    })
}

/// True if CoreDNS has read the Services of the cluster.
fn is_ready(gateway: IpAddr) -> bool {
    use std::io::{Read as _, Write as _};
    let ask = || -> std::io::Result<bool> {
        let server = SocketAddr::new(gateway, DNS_READY_PORT);
        let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"GET /ready HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.split_whitespace().nth(1) == Some("200"))
    };
    ask().unwrap_or(false)
}

fn start(testbed: &Testbed, name: &str, program: &str, arguments: &str) -> Result<()> {
    let mut command = vec![program.to_owned()];
    command.extend(
        filled(testbed, arguments)
            .split_whitespace()
            .map(ToOwned::to_owned),
    );
    testbed.inside.spawn(
        &testbed.cgroups,
        Daemon {
            name: name.into(),
            group: group_of(&format!("control/{name}")),
            umask: "022",
            command,
        },
    )
}

fn template(file: &str) -> Result<String> {
    let path = checkout::testbed_sources().join("addons").join(file);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

fn filled(testbed: &Testbed, text: &str) -> String {
    let addresses = testbed.state.addresses();
    fill(
        text,
        &[
            ("RUN", &testbed.run_folder.display().to_string()),
            ("GATEWAY", &addresses.gateway().to_string()),
            ("GATEWAY_HOST", &addresses.gateway_host()),
            ("DNS", &dns_address(testbed)),
            ("FAMILY", addresses.family.name()),
        ],
    )
}

/// Replaces each `${NAME}` in a template by its value.
pub(crate) fn fill(text: &str, values: &[(&str, &str)]) -> String {
    values.iter().fold(text.to_owned(), |text, (name, value)| {
        text.replace(&format!("${{{name}}}"), value)
    })
}

/// The IP address of the DNS server for pods.
pub(crate) fn dns_address(testbed: &Testbed) -> String {
    testbed.state.addresses().service(DNS_SERVICE).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_placeholders_in_templates_are_replaced() {
        assert_eq!(
            fill("a ${X}-${Y} ${X} ${Z}", &[("X", "1"), ("Y", "2")]),
            "a 1-2 1 ${Z}"
        );
    }

    #[test]
    fn templates_have_no_unknown_placeholders() {
        for file in ["addons.yaml", "Corefile.nocache", "Corefile.cache30"] {
            let text = fill(
                &template(file).unwrap(),
                &[
                    ("RUN", "r"),
                    ("GATEWAY", "g"),
                    ("GATEWAY_HOST", "h"),
                    ("DNS", "d"),
                    ("FAMILY", "f"),
                ],
            );
            let left: Vec<&str> = text
                .lines()
                .filter(|line| line.contains("${") && !line.starts_with('#'))
                .collect();
            assert!(left.is_empty(), "{file}: {left:?}");
        }
    }

    #[test]
    fn corefile_nocache_disables_dns_cache_and_cache30_does_not() {
        let nocache = template("Corefile.nocache").unwrap();
        assert!(
            nocache.contains("disable success cluster.local")
                && nocache.contains("disable denial cluster.local")
        );
        assert!(!template("Corefile.cache30").unwrap().contains("disable"));
    }
}
