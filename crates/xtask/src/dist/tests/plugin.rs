//! Tests of the archives and the manifest of the kubectl plugin, which Krew installs.

use super::*;

/// A folder with a program, and a folder with the archives and the manifest.
struct Files {
    work: tempfile::TempDir,
    new: tempfile::TempDir,
}

impl Files {
    /// Creates a script in place of the program of the plugin.
    fn new() -> Self {
        let files = Self {
            work: tempfile::tempdir().unwrap(),
            new: tempfile::tempdir().unwrap(),
        };
        fs::write(files.program(), "#!/bin/sh\necho it runs\n").unwrap();
        files
    }

    fn program(&self) -> PathBuf {
        self.work.path().join("kubectl-etcd")
    }

    /// Creates a file in place of the plugin's archive of another architecture.
    fn other(&self, name: &str) -> PathBuf {
        let path = self.work.path().join(name);
        fs::write(&path, "other").unwrap();
        path
    }

    fn write(&self, release: &Release, others: &[PathBuf]) -> Result<Vec<String>> {
        krew::write(release, &[self.program()], others, self.new.path())
    }

    fn manifest(&self) -> Json {
        let text = fs::read_to_string(self.new.path().join("etcd.yaml")).unwrap();
        serde_yaml_ng::from_str(&text).unwrap()
    }

    /// Runs `krew install` with the manifest and the file `archive`. Krew installs the plugin below `self.work`.
    fn install(&self, archive: &str) -> Result<String> {
        let mut command = Command::new(programs::krew()?);
        command
            .arg("install")
            .arg(format!(
                "--manifest={}",
                self.new.path().join("etcd.yaml").display()
            ))
            .arg(format!(
                "--archive={}",
                self.new.path().join(archive).display()
            ))
            .env("KREW_ROOT", self.work.path().join("krew"))
            .env("KREW_NO_UPGRADE_CHECK", "1");
        shell::output(&mut command)
    }
}

/// The architecture of the plugin that differs from the architecture of this machine.
fn other_architecture() -> &'static str {
    match crate::archive::architecture() {
        "amd64" => "arm64",
        _ => "amd64",
    }
}

#[test]
fn krew_installs_plugin_from_released_files() {
    let files = Files::new();
    let archives = files.write(&published(), &[]).unwrap();
    files.install(&archives[0]).unwrap();
    let bin = files.work.path().join("krew/bin/kubectl-etcd");
    let printed = shell::output(&mut Command::new(bin)).unwrap();
    assert_eq!(printed.trim(), "it runs");
}

#[test]
fn krew_rejects_archive_that_does_not_match_manifest_checksum() {
    let files = Files::new();
    let archives = files.write(&published(), &[]).unwrap();
    fs::write(files.program(), "another program").unwrap();
    let manifest = files.manifest();
    files.write(&published(), &[]).unwrap();
    let text = serde_yaml_ng::to_string(&manifest).unwrap();
    fs::write(files.new.path().join("etcd.yaml"), text).unwrap();
    let error = format!("{:#}", files.install(&archives[0]).unwrap_err());
    assert!(error.contains("checksum"), "{error}");
}

/// The checked rules come from `ValidatePlugin` and the naming guide of Krew.
#[test]
fn plugin_manifest_follows_krew_schema() {
    let files = Files::new();
    let release = published();
    let other = files.other(&release.plugin(other_architecture()));
    let archives = files.write(&release, &[other]).unwrap();
    assert_eq!(archives.len(), 2);
    let manifest = files.manifest();
    assert_eq!(
        manifest["apiVersion"],
        "krew.googlecontainertools.github.com/v1alpha2"
    );
    assert_eq!(manifest["kind"], "Plugin");
    assert_eq!(manifest["metadata"]["name"], "etcd");
    let spec = &manifest["spec"];
    let known = [
        "version",
        "homepage",
        "shortDescription",
        "description",
        "caveats",
        "platforms",
    ];
    let fields: Vec<&String> = spec.as_object().unwrap().keys().collect();
    assert!(
        fields.iter().all(|field| known.contains(&field.as_str())),
        "{fields:?}"
    );
    assert_eq!(spec["version"], format!("v{}", release.version));
    assert_eq!(spec["homepage"], "https://git.example.com/etcd-operator");
    let short = spec["shortDescription"].as_str().unwrap();
    // Krew truncates descriptions of more than 50 characters in its list of plugins.
    assert!(
        !short.is_empty() && short.len() <= 50 && !short.contains('\n'),
        "{short}"
    );
    let sums = listing::sums(files.new.path()).unwrap();
    let platforms = spec["platforms"].as_array().unwrap();
    assert_eq!(platforms.len(), archives.len());
    for (platform, architecture) in platforms.iter().zip(["amd64", "arm64"]) {
        let selector = json_of(&[("os", "linux"), ("arch", architecture)]);
        assert_eq!(platform["selector"]["matchLabels"], selector);
        assert_eq!(platform["bin"], "kubectl-etcd");
        let name = release.plugin(architecture);
        let address = release.files.as_deref().unwrap();
        assert_eq!(platform["uri"], format!("{address}/{name}"));
        let sum = sums.iter().find(|sum| sum.name == name).unwrap();
        assert_eq!(platform["sha256"], sum.sha256);
        assert_eq!(sum.sha256.len(), 64);
    }
}

fn json_of(fields: &[(&str, &str)]) -> Json {
    let fields = fields.iter();
    fields
        .map(|(key, value)| ((*key).to_owned(), Json::from(*value)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

#[test]
fn plugin_archive_is_reproducible_and_has_license() {
    let (first, second) = (Files::new(), Files::new());
    let name = &first.write(&published(), &[]).unwrap()[0];
    second.write(&published(), &[]).unwrap();
    let read = |files: &Files| fs::read(files.new.path().join(name)).unwrap();
    assert_eq!(read(&first), read(&second));
    let mut list = Command::new("tar");
    list.arg("-tzf").arg(first.new.path().join(name));
    assert_eq!(shell::output(&mut list).unwrap(), "kubectl-etcd\nLICENSE\n");
}

#[test]
fn plugin_archive_of_other_release_or_same_architecture_is_rejected() {
    let release = published();
    let files = Files::new();
    for name in [
        "kubectl-etcd.tar.gz".to_owned(),
        release.plugin(crate::archive::architecture()),
        format!("kubectl-etcd-9.9.9-linux-{}.tar.gz", other_architecture()),
    ] {
        let error = files.write(&release, &[files.other(&name)]).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains(&release.plugin(other_architecture())),
            "{error}"
        );
    }
}

#[test]
fn release_without_files_url_has_no_plugin_manifest() {
    let files = Files::new();
    let mut release = published();
    release.files = None;
    assert_eq!(files.write(&release, &[]).unwrap().len(), 1);
    assert!(!files.new.path().join("etcd.yaml").exists());
}

#[test]
fn files_url_comes_from_option_or_source_repository() {
    let options =
        |args: &[&str]| <Wrapper as clap::Parser>::parse_from(["dist"].iter().chain(args)).options;
    let origin = published().origin;
    let found = files_url(&options(&["--version", "1.2.3"]), &origin);
    let expected = "https://git.example.com/etcd-operator/releases/download/v1.2.3";
    assert_eq!(found.as_deref(), Some(expected));
    let given = options(&["--files-url", "https://files.example.com/etcd/"]);
    let found = files_url(&given, &origin);
    assert_eq!(found.as_deref(), Some("https://files.example.com/etcd"));
    let unknown = Origin {
        source: None,
        ..origin
    };
    assert_eq!(files_url(&options(&[]), &unknown), None);
}

/// A parser for the options of `dist`.
#[derive(clap::Parser)]
struct Wrapper {
    #[command(flatten)]
    options: Options,
}
