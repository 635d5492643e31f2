//! The bundle for the Operator Lifecycle Manager (OLM). Its ClusterServiceVersion is generated from the rendered
//! chart, Chart.yaml, the CRDs and the examples.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::chart::{self, KUBERNETES, Manifest, Text};
use super::names::Release;
use crate::{checkout, shell};

/// The install modes of OLM, with true for supported modes. A ClusterServiceVersion has the same Deployments for all
/// modes, and the arguments of the operators select their namespaces. So the bundle supports only the operators' own
/// namespace, which needs the fewest permissions.
///
/// To support more modes, make the operators read their namespaces from the pod annotation `olm.targetNamespaces`,
/// which OLM sets.
const INSTALL_MODES: [(&str, bool); 4] = [
    ("OwnNamespace", true),
    ("SingleNamespace", false),
    ("MultiNamespace", false),
    ("AllNamespaces", false),
];

/// The chart values of the bundle. Users of the bundle cannot change them. No user ID is set, because OpenShift assigns
/// user IDs to pods.
pub(super) const RENDERING: Manifest = Manifest {
    namespace: "etcd",
    values: &[
        "metricsService.enabled=false",
        "podSecurityContext.runAsUser=null",
        "podSecurityContext.runAsGroup=null",
        "podSecurityContext.fsGroup=null",
    ],
};

/// The name of the package in a catalog.
const PACKAGE: &str = "etcd-operator";
/// The annotation of the ClusterServiceVersion with the examples for consoles.
const EXAMPLES_ANNOTATION: &str = "alm-examples";
/// The files in `examples/` that become examples of the bundle. They contain at least one object for each CRD.
const EXAMPLES: [&str; 5] = [
    "example-etcd-cluster-durable.yaml",
    "example-etcd-backup-s3.yaml",
    "example-etcd-restore.yaml",
    "example-etcd-mirror.yaml",
    "example-etcd-user.yaml",
];
const ICON: &str = include_str!("icon.svg");
/// Labels of Helm, which are removed because OLM manages the objects of the bundle.
const HELM_LABELS: [&str; 2] = ["app.kubernetes.io/managed-by", "helm.sh/chart"];
const MANIFESTS: &str = "bundle/manifests";
const METADATA: &str = "bundle/metadata";

/// The files of the bundle. `rendered` is the chart, rendered with [`RENDERING`].
pub(super) fn files(release: &Release, chart: &[Text], rendered: &str) -> Result<Vec<Text>> {
    let definitions: Vec<&Text> = chart::definitions(chart).collect();
    let version = service_version(release, chart, &definitions, rendered)?;
    let labels = labels(release);
    let mut all = vec![
        ("bundle.Dockerfile".to_owned(), dockerfile(&labels)),
        (
            format!("{METADATA}/annotations.yaml"),
            yaml(&json!({ "annotations": labels }))?,
        ),
        (
            format!("{MANIFESTS}/{PACKAGE}.clusterserviceversion.yaml"),
            yaml(&version)?,
        ),
    ];
    all.extend(definitions.into_iter().map(|(path, text)| {
        let name = path.rsplit('/').next().unwrap_or(path);
        (format!("{MANIFESTS}/{name}"), text.clone())
    }));
    Ok(all)
}

/// Checks the files with the validators of the operator framework, and returns the warnings. `tool` is the program in
/// `e2e/testbed/olm`, and `folder` an empty folder.
pub(super) fn validate(tool: &Path, files: &[Text], folder: &Path) -> Result<Vec<String>> {
    for (path, text) in files {
        let file = folder.join(path);
        let parent = file.parent().unwrap_or(folder);
        fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    let warnings = shell::output(Command::new(tool).arg(folder.join("bundle")))
        .context("the bundle for OLM is invalid")?;
    Ok(warnings.lines().map(str::to_owned).collect())
}

fn yaml(value: &Value) -> Result<String> {
    Ok(serde_yaml_ng::to_string(value)?)
}

/// Parses the objects of a manifest.
fn objects(manifest: &str) -> Result<Vec<Value>> {
    serde_yaml_ng::Deserializer::from_str(manifest)
        .map(|document| Ok(Value::deserialize(document)?))
        .collect()
}

fn of_kind<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["kind"] == kind)
}

/// The catalog channel of the release. OLM installs a pre-release only for users who select the channel `candidate`.
fn channel(release: &Release) -> &'static str {
    if release.version.contains('-') {
        "candidate"
    } else {
        "stable"
    }
}

/// The annotations of the bundle, which are also the labels of its image.
fn labels(release: &Release) -> BTreeMap<String, String> {
    let channel = channel(release);
    [
        ("mediatype.v1", "registry+v1"),
        ("manifests.v1", "manifests/"),
        ("metadata.v1", "metadata/"),
        ("package.v1", PACKAGE),
        ("channels.v1", channel),
        ("channel.default.v1", channel),
    ]
    .map(|(name, value)| {
        let name = format!("operators.operatorframework.io.bundle.{name}");
        (name, value.to_owned())
    })
    .into()
}

/// The Dockerfile of the bundle's image. The build context is the folder of the Dockerfile.
fn dockerfile(labels: &BTreeMap<String, String>) -> String {
    let mut lines = String::new();
    for (name, value) in labels {
        let _ = writeln!(lines, "LABEL {name}={value}");
    }
    format!("FROM scratch\n\n{lines}\nCOPY {MANIFESTS} /manifests/\nCOPY {METADATA} /metadata/\n")
}

/// The ClusterServiceVersion: Deployments, permissions, and texts for catalogs.
fn service_version(
    release: &Release,
    chart: &[Text],
    definitions: &[&Text],
    rendered: &str,
) -> Result<Value> {
    let about = chart.iter().find(|(path, _)| path == "Chart.yaml");
    let (_, about) = about.context("the chart has no file Chart.yaml")?;
    let about: Value = serde_yaml_ng::from_str(about).context("Chart.yaml")?;
    let rendered = objects(rendered).context("the rendered chart")?;
    let definitions: Vec<Value> = definitions
        .iter()
        .map(|(path, text)| serde_yaml_ng::from_str(text).with_context(|| path.clone()))
        .collect::<Result<_>>()?;
    let owned: Vec<Value> = definitions.iter().map(owned).collect();
    let mut install = json!({ "deployments": deployments(&rendered) });
    for (field, binding, role) in [
        ("permissions", "RoleBinding", "Role"),
        ("clusterPermissions", "ClusterRoleBinding", "ClusterRole"),
    ] {
        let rules = permissions(&rendered, binding, role)?;
        if !rules.is_empty() {
            install[field] = json!(rules);
        }
    }
    let modes =
        INSTALL_MODES.map(|(mode, supported)| json!({"type": mode, "supported": supported}));
    let summary = about["description"].as_str().unwrap_or_default();
    let mut annotations = json!({
        EXAMPLES_ANNOTATION: examples()?,
        "capabilities": "Full Lifecycle",
        "categories": "Database",
        "certified": "false",
        "containerImage": release.image(),
        "description": summary,
        "operatorframework.io/suggested-namespace": RENDERING.namespace,
        // `skipRange` lets OLM update from every older release directly to this release.
        "olm.skipRange": format!("<{}", release.version),
    });
    for (name, value) in [
        ("createdAt", &release.origin.created),
        ("repository", &release.origin.source),
    ] {
        if let Some(value) = value {
            annotations[name] = json!(value);
        }
    }
    let mut spec = json!({
        "displayName": "etcd operator",
        "description": description(release, summary, &owned),
        "version": release.version,
        "minKubeVersion": KUBERNETES,
        "keywords": about["keywords"],
        "links": links(&about),
        "provider": { "name": about["maintainers"][0]["name"] },
        "icon": [{ "base64data": STANDARD.encode(ICON), "mediatype": "image/svg+xml" }],
        "install": { "strategy": "deployment", "spec": install },
        "installModes": modes,
        "customresourcedefinitions": { "owned": owned },
        "relatedImages": [{ "name": PACKAGE, "image": release.image() }],
    });
    let maintainers = maintainers(&about);
    if !maintainers.is_empty() {
        spec["maintainers"] = json!(maintainers);
    }
    Ok(json!({
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": format!("{PACKAGE}.v{}", release.version),
            // OLM replaces this placeholder with the namespace of the installation.
            "namespace": "placeholder",
            "annotations": annotations,
        },
        "spec": spec,
    }))
}

/// The maintainers in Chart.yaml with an e-mail address, which OLM requires.
fn maintainers(about: &Value) -> Vec<&Value> {
    let all = about["maintainers"].as_array().into_iter().flatten();
    all.filter(|it| it["email"].is_string()).collect()
}

/// The URLs in Chart.yaml as links of the ClusterServiceVersion. The name of a link is its URL without the scheme.
fn links(about: &Value) -> Vec<Value> {
    let sources = about["sources"].as_array().into_iter().flatten();
    std::iter::once(&about["home"])
        .chain(sources)
        .filter_map(Value::as_str)
        .map(|url| json!({ "name": url.trim_start_matches("https://"), "url": url }))
        .collect()
}

fn description(release: &Release, summary: &str, owned: &[Value]) -> String {
    let mut kinds = String::new();
    for entry in owned {
        let text = entry["description"].as_str().unwrap_or_default();
        let _ = writeln!(kinds, "- {text}");
    }
    format!(
        "{summary}\n\n{kinds}\n\
         The operators watch only the namespace in which OLM installs them, and have rights only there.\n\n\
         Members without volumes lose their data with their pods: set `spec.pod.persistentVolumeClaimSpec`. \
         `spec.protected` has no effect, because the bundle contains no admission policy. \
         The documentation starts with {page}.\n",
        page = release.page("docs/install.md"),
    )
}

/// The entry for a CRD in the ClusterServiceVersion.
fn owned(definition: &Value) -> Value {
    let spec = &definition["spec"];
    let kind = spec["names"]["kind"].as_str().unwrap_or_default();
    let version = &spec["versions"][0];
    json!({
        "name": definition["metadata"]["name"],
        "kind": kind,
        "version": version["name"],
        // For example, the display name of `EtcdCluster` is "etcd cluster".
        "displayName": format!("etcd {}", kind.trim_start_matches("Etcd").to_lowercase()),
        "description": version["schema"]["openAPIV3Schema"]["description"],
    })
}

/// The Deployments of the operators, without the labels of Helm.
fn deployments(rendered: &[Value]) -> Vec<Value> {
    let without_helm = |metadata: &Value| {
        let mut labels = metadata["labels"].clone();
        if let Some(labels) = labels.as_object_mut() {
            labels.retain(|name, _| !HELM_LABELS.contains(&name.as_str()));
        }
        labels
    };
    of_kind(rendered, "Deployment")
        .map(|deployment| {
            let mut spec = deployment["spec"].clone();
            let metadata = &mut spec["template"]["metadata"];
            metadata["labels"] = without_helm(metadata);
            json!({
                "name": deployment["metadata"]["name"],
                "label": without_helm(&deployment["metadata"]),
                "spec": spec,
            })
        })
        .collect()
}

/// The RBAC rules of each ServiceAccount. OLM creates the ServiceAccounts, roles and bindings.
fn permissions(rendered: &[Value], binding: &str, role: &str) -> Result<Vec<Value>> {
    let mut rules: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for binding in of_kind(rendered, binding) {
        let name = &binding["roleRef"]["name"];
        let role = of_kind(rendered, role).find(|role| role["metadata"]["name"] == *name);
        let role = role.with_context(|| format!("the chart has no role {name}"))?;
        let account = binding["subjects"][0]["name"].as_str();
        let account = account.with_context(|| format!("the binding of {name} has no subject"))?;
        let all = role["rules"].as_array().into_iter().flatten().cloned();
        rules.entry(account).or_default().extend(all);
    }
    Ok(rules
        .into_iter()
        .map(|(account, rules)| json!({ "serviceAccountName": account, "rules": rules }))
        .collect())
}

/// The examples as a JSON array.
fn examples() -> Result<String> {
    let mut all: Vec<Value> = Vec::new();
    for name in EXAMPLES {
        let file = checkout::root().join("examples").join(name);
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        all.extend(objects(&text).with_context(|| file.display().to_string())?);
    }
    // The first example is an EtcdCluster, and the second is an EtcdBackup. The EtcdCluster gets the name in
    // `spec.etcdCluster` of the EtcdBackup, so that the EtcdBackup backs up this EtcdCluster.
    all[0]["metadata"]["name"] = all[1]["spec"]["etcdCluster"]["name"].clone();
    Ok(serde_json::to_string_pretty(&all)?)
}
