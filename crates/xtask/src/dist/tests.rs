//! Tests of the release files that `dist` can write without a compiled program. Helm comes from the cache of the
//! testbed.

use std::collections::BTreeSet;

use serde_json::Value as Json;
use serde_yaml_ng::Value;

use super::*;

mod plugin;

/// The kinds of the CRDs, in the order of their file names.
const KINDS: [&str; 6] = [
    "EtcdBackup",
    "EtcdCluster",
    "EtcdMirror",
    "EtcdRestore",
    "EtcdRole",
    "EtcdUser",
];
const NAMESPACED_SELECTOR: &str =
    "matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: [etcd]}]";
const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn release(repository: &str, digest: Option<&str>) -> Release {
    let version = format!("{}-rc.1", origin::VERSION);
    Release {
        origin: Origin {
            version: version.clone(),
            revision: Some("0123456789012345678901234567890123456789".into()),
            source: Some("https://git.example.com/etcd-operator".into()),
            created: Some("2026-11-01T00:00:00Z".into()),
        },
        files: Some(format!(
            "https://git.example.com/etcd-operator/releases/download/v{version}"
        )),
        plugins: vec![format!("kubectl-etcd-{version}-linux-amd64.tar.gz")],
        version,
        repository: repository.into(),
        digest: digest.map(str::to_owned),
    }
}

fn published() -> Release {
    release("registry.example.com/a/etcd-operator", Some(DIGEST))
}

/// Packages the chart of the release in `folder`, and returns the path of the package.
fn packaged(folder: &Path, release: &Release) -> PathBuf {
    let files = chart::released(chart::files().unwrap(), release).unwrap();
    let package = folder.join(release.chart());
    fs::write(&package, chart::package(&files).unwrap()).unwrap();
    package
}

fn rendered(release: &Release, manifest: &chart::Manifest) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let package = packaged(dir.path(), release);
    let text = chart::render(&programs::helm().unwrap(), &package, manifest).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| serde::Deserialize::deserialize(document).unwrap())
        .collect()
}

fn kinds(objects: &[Value]) -> BTreeSet<&str> {
    objects
        .iter()
        .filter_map(|object| object["kind"].as_str())
        .collect()
}

fn images(objects: &[Value]) -> Vec<String> {
    let deployments = objects
        .iter()
        .filter(|object| object["kind"] == "Deployment");
    let image = |object: &Value| {
        object["spec"]["template"]["spec"]["containers"][0]["image"]
            .as_str()
            .map(str::to_owned)
    };
    deployments.filter_map(image).collect()
}

#[test]
fn manifests_run_the_released_image() {
    let release = published();
    for manifest in [&chart::NAMESPACED, &chart::CLUSTER_WIDE] {
        let images = images(&rendered(&release, manifest));
        let expected = format!(
            "registry.example.com/a/etcd-operator:{}@{DIGEST}",
            release.version
        );
        assert_eq!(images, vec![expected; 3]);
    }
    let local = release_without_registry();
    let images = images(&rendered(&local, &chart::NAMESPACED));
    assert_eq!(
        images[0],
        format!("localhost/etcd-operator:{}", local.version)
    );
}

fn release_without_registry() -> Release {
    release(image::NAME, None)
}

/// `kubectl delete -f` with the manifest must delete only the operators.
#[test]
fn manifests_contain_no_crd_namespace_etcdcluster_or_pod() {
    for manifest in [&chart::NAMESPACED, &chart::CLUSTER_WIDE] {
        let objects = rendered(&published(), manifest);
        let kinds = kinds(&objects);
        for kind in ["CustomResourceDefinition", "Namespace", "EtcdCluster"] {
            assert!(!kinds.contains(kind), "{kinds:?}");
        }
        // The chart has a pod for `helm test`. The manifest must not contain this pod.
        assert!(!kinds.contains("Pod"), "{kinds:?}");
        let namespaces = objects
            .iter()
            .filter_map(|it| it["metadata"]["namespace"].as_str());
        assert!(namespaces.into_iter().all(|it| it == manifest.namespace));
    }
}

#[test]
fn only_cluster_wide_manifest_contains_cluster_roles() {
    let own = rendered(&published(), &chart::NAMESPACED);
    assert!(kinds(&own).contains("Role") && !kinds(&own).contains("ClusterRole"));
    let all = rendered(&published(), &chart::CLUSTER_WIDE);
    assert!(kinds(&all).contains("ClusterRole"));
}

/// Without the admission policies, `spec.protected` has no effect.
#[test]
fn manifests_contain_admission_policies_for_their_namespaces() {
    for (manifest, selector) in [
        (&chart::NAMESPACED, Some(NAMESPACED_SELECTOR)),
        (&chart::CLUSTER_WIDE, None),
    ] {
        let objects = rendered(&published(), manifest);
        let of = |kind: &str| -> Vec<&Value> {
            let found = objects.iter().filter(|object| object["kind"] == kind);
            found.collect()
        };
        let policies = of("ValidatingAdmissionPolicy");
        let bindings = of("ValidatingAdmissionPolicyBinding");
        let expected: Option<Value> = selector.map(|it| serde_yaml_ng::from_str(it).unwrap());
        let mut resources = BTreeSet::new();
        for policy in policies {
            let constraints = &policy["spec"]["matchConstraints"];
            resources.extend(constraints["resourceRules"][0]["resources"][0].as_str());
            assert_eq!(constraints.get("namespaceSelector"), expected.as_ref());
            let name = &policy["metadata"]["name"];
            let mut bound = bindings.iter().map(|it| &it["spec"]["policyName"]);
            assert!(bound.any(|it| it == name), "{name:?} has no binding");
        }
        assert_eq!(resources, BTreeSet::from(["etcdclusters", "namespaces"]));
    }
}

#[test]
fn packaged_chart_passes_lint_and_is_reproducible() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = dirs
        .each_ref()
        .map(|dir| packaged(dir.path(), &published()));
    chart::lint(&programs::helm().unwrap(), &first).unwrap();
    assert_eq!(fs::read(first).unwrap(), fs::read(second).unwrap());
}

#[test]
fn released_chart_does_not_say_that_image_is_unpublished() {
    for (name, text) in chart::released(chart::files().unwrap(), &published()).unwrap() {
        for old in [
            "is in no registry",
            "No image is published",
            "../../docs",
            "image.repository=REPOSITORY",
        ] {
            assert!(!text.contains(old), "{name}: {old}");
        }
        if name == "Chart.yaml" {
            assert!(
                text.contains("- https://git.example.com/etcd-operator\n"),
                "{text}"
            );
        }
    }
}

#[test]
fn release_fails_if_text_to_replace_is_missing_in_chart() {
    let mut files = chart::files().unwrap();
    for (_, text) in files.iter_mut().filter(|(name, _)| name == "values.yaml") {
        *text = text.replace("localhost/etcd-operator", "elsewhere/etcd-operator");
    }
    let error = format!("{:#}", chart::released(files, &published()).unwrap_err());
    assert!(error.contains("values.yaml"), "{error}");
}

#[test]
fn crd_file_contains_all_kinds() {
    let text = chart::crds(&chart::files().unwrap());
    let names: Vec<String> = serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| <Value as serde::Deserialize>::deserialize(document).unwrap())
        .filter_map(|object| object["spec"]["names"]["kind"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(names, KINDS);
}

/// The files of the bundle for OLM.
fn bundle(release: &Release) -> Vec<Text> {
    let dir = tempfile::tempdir().unwrap();
    let package = packaged(dir.path(), release);
    let rendered = chart::render(&programs::helm().unwrap(), &package, &olm::RENDERING).unwrap();
    let chart = chart::released(chart::files().unwrap(), release).unwrap();
    olm::files(release, &chart, &rendered).unwrap()
}

/// Runs the validators of the operator framework on the bundle, and returns the warnings.
fn validated(files: &[Text]) -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    olm::validate(&programs::olm_validate()?, files, dir.path())
}

fn service_version(files: &[Text]) -> Value {
    let name = "clusterserviceversion.yaml";
    let found = files.iter().find(|(path, _)| path.ends_with(name));
    serde_yaml_ng::from_str(&found.unwrap().1).unwrap()
}

#[test]
fn operator_framework_accepts_bundle() {
    for release in [published(), release_without_registry()] {
        let warnings = validated(&bundle(&release)).unwrap();
        assert!(warnings.is_empty(), "{warnings:#?}");
    }
}

#[test]
fn operator_framework_rejects_bundle_without_crd() {
    let mut files = bundle(&published());
    files.retain(|(path, _)| !path.contains("etcdrestores"));
    let error = format!("{:#}", validated(&files).unwrap_err());
    assert!(error.contains("EtcdRestore"), "{error}");
    assert!(error.contains("not found in bundle"), "{error}");
}

#[test]
fn operator_framework_rejects_bundle_with_unknown_or_invalid_version() {
    let version = published().version;
    for (from, to, expected) in [
        // The ClusterServiceVersion names the API version v1beta9, which no CRD has.
        ("version: v1beta2", "version: v1beta9", "v1beta9"),
        // `spec.version` of the ClusterServiceVersion must be a semantic version, and `first` is none.
        (
            &*format!("\n  version: {version}"),
            "\n  version: first",
            "major number",
        ),
    ] {
        let mut files = bundle(&published());
        let text = files.iter_mut().map(|(_, text)| text);
        let changed = text.filter(|text| text.contains("kind: ClusterServiceVersion"));
        for text in changed {
            assert!(text.contains(from), "{text}");
            *text = text.replace(from, to);
        }
        let error = format!("{:#}", validated(&files).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

/// The bundle and the manifest for one namespace request the same permissions.
#[test]
fn bundle_installs_operators_with_permissions_of_namespaced_manifest() {
    let files = bundle(&published());
    let version = service_version(&files);
    let install = &version["spec"]["install"]["spec"];
    assert!(install.get("clusterPermissions").is_none());
    let manifest = rendered(&published(), &chart::NAMESPACED);
    let operators = [
        "etcd-operator",
        "etcd-backup-operator",
        "etcd-restore-operator",
    ];
    assert_eq!(install["deployments"].as_sequence().unwrap().len(), 3);
    for operator in operators {
        let rules = |name: &str| {
            let role = manifest
                .iter()
                .find(|object| object["kind"] == "Role" && object["metadata"]["name"] == name);
            role.unwrap()["rules"].as_sequence().unwrap().clone()
        };
        let expected = [rules(operator), rules(&format!("{operator}-lease"))].concat();
        let granted = install["permissions"].as_sequence().unwrap();
        let granted = granted
            .iter()
            .find(|it| it["serviceAccountName"] == operator);
        assert_eq!(granted.unwrap()["rules"].as_sequence(), Some(&expected));
        let deployments = install["deployments"].as_sequence().unwrap();
        let deployment = deployments.iter().find(|it| it["name"] == operator);
        let pod = &deployment.unwrap()["spec"]["template"]["spec"];
        assert_eq!(pod["serviceAccountName"], operator);
        // The bundle must not set a user ID, because OpenShift assigns user IDs to pods.
        assert!(pod["securityContext"].get("runAsUser").is_none());
        let args = pod["containers"][0]["args"].as_sequence().unwrap();
        assert!(args.contains(&"--cluster-wide=false".into()), "{args:?}");
    }
    let modes = version["spec"]["installModes"].as_sequence().unwrap();
    let supported = modes.iter().filter(|mode| mode["supported"] == true);
    let supported: Vec<_> = supported.map(|mode| mode["type"].as_str()).collect();
    assert_eq!(supported, [Some("OwnNamespace")]);
}

#[test]
fn bundle_has_every_kind_with_description_and_example() {
    let version = service_version(&bundle(&published()));
    let owned = &version["spec"]["customresourcedefinitions"]["owned"];
    let owned = owned.as_sequence().unwrap();
    let text = |node: &Value| node.as_str().unwrap_or_default().to_owned();
    let kinds: Vec<String> = owned.iter().map(|it| text(&it["kind"])).collect();
    assert_eq!(kinds, KINDS);
    assert!(
        owned
            .iter()
            .all(|it| text(&it["description"]).contains(' '))
    );
    let examples = text(&version["metadata"]["annotations"]["alm-examples"]);
    let examples: Json = serde_json::from_str(&examples).unwrap();
    let examples = examples.as_array().unwrap();
    // The EtcdBackup among the examples must name the EtcdCluster among the examples.
    let of = |kind: &str| examples.iter().find(|it| it["kind"] == kind).unwrap();
    let name = &of("EtcdCluster")["metadata"]["name"];
    assert_eq!(of("EtcdBackup")["spec"]["etcdCluster"]["name"], *name);
    for kind in kinds {
        assert!(
            examples.iter().any(|it| it["kind"] == kind.as_str()),
            "{kind}"
        );
    }
}

#[test]
fn bundle_channel_is_candidate_for_pre_release_and_stable_for_release() {
    let annotations = |release: &Release| -> String {
        let files = bundle(release);
        let found = files
            .iter()
            .find(|(path, _)| path.ends_with("annotations.yaml"));
        found.unwrap().1.clone()
    };
    let mut release = published();
    assert!(annotations(&release).contains("channels.v1: candidate\n"));
    release.version = origin::VERSION.to_owned();
    assert!(annotations(&release).contains("channels.v1: stable\n"));
}

/// The scripts of workflow steps are not checked, because shellcheck is not available as a Go module.
#[test]
fn workflows_pass_actionlint() {
    let mut command = Command::new(programs::actionlint().unwrap());
    command.args(["-no-color", "-shellcheck=", "-pyflakes="]);
    let folder = checkout::root().join(".github/workflows");
    let files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|it| it.unwrap().path())
        .collect();
    assert!(files.len() > 1);
    let output = command.args(&files).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
}

/// The commands that publish a release, without logins: program, subcommand and flags without values.
fn publishing_commands(text: &str) -> BTreeSet<String> {
    const PROGRAMS: [&str; 5] = ["skopeo ", "helm ", "cosign ", "buildah ", "gh "];
    let lines = text.lines().map(str::trim);
    let commands = lines.filter(|line| PROGRAMS.iter().any(|program| line.starts_with(program)));
    commands
        .map(|line| {
            let words = line.split_whitespace().enumerate();
            let kept = words.filter(|(at, word)| *at < 2 || word.starts_with("--"));
            kept.map(|(_, word)| word).collect::<Vec<_>>().join(" ")
        })
        .filter(|command| !command.contains(" login") && !command.contains(" registry"))
        .collect()
}

#[test]
fn release_workflow_runs_publishing_commands_of_releasing_page() {
    let read = |path: &str| fs::read_to_string(checkout::root().join(path)).unwrap();
    let workflow = publishing_commands(&read(".github/workflows/release.yaml"));
    let page = read("docs/contributing/releasing.md");
    // On the page, the `gh` command is in the middle of a line. It gets its own line, because `publishing_commands`
    // finds only commands at the beginning of a line.
    let page = page.replace(": `gh ", "\ngh ");
    // The page also contains `helm install` and `helm test`. A maintainer runs these commands before a release. The
    // workflow does not run them.
    let mut page = publishing_commands(&page);
    page.retain(|it| {
        !["helm install", "helm test"]
            .iter()
            .any(|tried| it.starts_with(tried))
    });
    assert_eq!(workflow, page);
    assert!(workflow.len() > 7, "{workflow:?}");
}

#[test]
fn release_readme_describes_every_file() {
    for release in [published(), release_without_registry()] {
        let page = listing::readme(&release);
        for (name, _) in listing::files(&release) {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
        assert_eq!(
            page.contains("No registry serves"),
            release.digest.is_none()
        );
        assert!(page.contains("kubectl krew install --manifest=etcd.yaml"));
    }
    let mut unknown = published();
    unknown.files = None;
    let page = listing::readme(&unknown);
    assert!(
        !page.contains("etcd.yaml") && page.contains("kubectl-etcd-"),
        "{page}"
    );
}

#[test]
fn checksums_have_format_of_sha256sum() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "b", "").unwrap();
    put(dir.path(), "a", "").unwrap();
    let text = listing::text(&listing::sums(dir.path()).unwrap());
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert_eq!(text, format!("{empty}  a\n{empty}  b\n"));
    put(dir.path(), listing::SUMS, &text).unwrap();
    let mut check = Command::new("sha256sum");
    shell::output(check.args(["-c", listing::SUMS]).current_dir(dir.path())).unwrap();
}

#[test]
fn comparison_of_builds_names_changed_and_missing_files() {
    let sum = |name: &str, sha256: &str| Sum {
        name: name.into(),
        sha256: sha256.into(),
    };
    let first = [sum("a", "1"), sum("b", "1"), sum("c", "1")];
    let second = [sum("a", "1"), sum("b", "2"), sum("d", "1")];
    assert_eq!(listing::differences(&first, &second), ["b", "c", "d"]);
    assert!(listing::differences(&first, &first).is_empty());
}

#[test]
fn provenance_names_files_image_commit_and_tools() {
    let release = published();
    let sums = [Sum {
        name: "install.yaml".into(),
        sha256: "ab".into(),
    }];
    let inputs = provenance::Inputs {
        tools: vec![("rustc", "rustc 1.0".into())],
        files: sums.to_vec(),
    };
    let statement = || provenance::statement(&release, "urn:b", &inputs, &sums).unwrap();
    // The provenance statement contains no build time, so two builds of the same source have equal statements.
    assert_eq!(statement(), statement());
    let json: Json = serde_json::from_str(&statement()).unwrap();
    assert_eq!(json["_type"], "https://in-toto.io/Statement/v1");
    assert_eq!(json["predicateType"], "https://slsa.dev/provenance/v1");
    assert_eq!(json["subject"][0]["digest"]["sha256"], "ab");
    assert_eq!(json["subject"][1]["name"], release.repository.as_str());
    assert_eq!(
        json["subject"][1]["digest"]["sha256"],
        DIGEST.trim_start_matches("sha256:")
    );
    let definition = &json["predicate"]["buildDefinition"];
    let commit = &definition["resolvedDependencies"][0];
    assert_eq!(commit["uri"], "git+https://git.example.com/etcd-operator");
    assert_eq!(
        commit["digest"]["gitCommit"],
        release.origin.revision.as_deref().unwrap()
    );
    assert_eq!(
        definition["internalParameters"]["tools"]["rustc"],
        "rustc 1.0"
    );
    assert_eq!(json["predicate"]["runDetails"]["builder"]["id"], "urn:b");
}

#[test]
fn image_repository_must_consist_of_registry_and_name() {
    for good in ["registry.example.com/etcd-operator", "localhost:5000/a/b"] {
        check_repository(good).unwrap();
    }
    for bad in [
        "etcd-operator",
        "https://x/y",
        "x/y:1",
        "x/y@sha256:0",
        "x/",
    ] {
        let error = check_repository(bad).unwrap_err().to_string();
        assert!(error.contains("REGISTRY/NAME"), "{error}");
    }
}

#[test]
fn nonempty_folder_without_release_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    check_output(dir.path()).unwrap();
    check_output(&dir.path().join("missing")).unwrap();
    put(dir.path(), "letter.txt", "").unwrap();
    let error = check_output(dir.path()).unwrap_err().to_string();
    assert!(error.contains("--output"), "{error}");
    put(dir.path(), listing::SUMS, "").unwrap();
    check_output(dir.path()).unwrap();
}
