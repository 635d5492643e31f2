//! Writes a container image as a docker-archive: a tar file with one layer, a configuration and a manifest. The bytes
//! depend only on the content.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

/// A file of the image.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Path of the source file on this machine.
    pub(crate) source: PathBuf,
    /// Path in the image, without a leading slash.
    pub(crate) path: String,
    pub(crate) mode: u32,
}

impl Entry {
    /// An executable file.
    pub(crate) fn program(source: &Path, path: &str) -> Self {
        Self {
            source: source.to_path_buf(),
            path: path.to_owned(),
            mode: 0o755,
        }
    }

    /// A file that is not executable.
    pub(crate) fn data(source: &Path, path: &str) -> Self {
        Self {
            source: source.to_path_buf(),
            path: path.to_owned(),
            mode: 0o644,
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Image {
    /// Names of the image with tags, such as `quay.io/coreos/etcd:v3.6.16`.
    pub(crate) names: Vec<String>,
    pub(crate) entries: Vec<Entry>,
    /// Symbolic links: the path of the link in the image, and its target.
    pub(crate) links: Vec<(String, String)>,
    /// Empty folders of the image. Parent folders of files are added automatically.
    pub(crate) folders: Vec<String>,
    pub(crate) entrypoint: Vec<String>,
    /// The user of the image as `UID:GID`. An empty text means root.
    pub(crate) user: String,
    pub(crate) labels: Vec<(String, String)>,
    /// The creation time that the image records, in the format of RFC 3339. It is never the time of the build, because
    /// two builds of the same content must have the same bytes.
    pub(crate) created: Option<String>,
}

impl Image {
    /// Writes the image to `file`, and returns the digest of its layer.
    pub(crate) fn write(&self, file: &Path) -> Result<String> {
        let layer_file = file.with_extension("layer");
        let digest = self
            .write_layer(&layer_file)
            .with_context(|| format!("layer of {}", file.display()))?;
        let config = self.config(&digest);
        let config_name = format!("{}.json", hex::encode(Sha256::digest(&config)));
        let layer_name = format!("{digest}/layer.tar");
        let manifest =
            json!([{ "Config": config_name, "RepoTags": self.names, "Layers": [layer_name] }])
                .to_string();
        let mut archive =
            tar::Builder::new(File::create(file).with_context(|| file.display().to_string())?);
        append(
            &mut archive,
            &config_name,
            0o644,
            config.len() as u64,
            config.as_bytes(),
        )?;
        let mut layer = File::open(&layer_file)?;
        let size = layer.metadata()?.len();
        append(&mut archive, &layer_name, 0o644, size, &mut layer)?;
        append(
            &mut archive,
            "manifest.json",
            0o644,
            manifest.len() as u64,
            manifest.as_bytes(),
        )?;
        archive.into_inner()?.flush()?;
        std::fs::remove_file(&layer_file)?;
        Ok(digest)
    }

    /// All properties of the image except the content of its files, for the hash in the tag of the image.
    pub(crate) fn settings(&self) -> String {
        let paths: Vec<_> = self
            .entries
            .iter()
            .map(|entry| (&entry.path, entry.mode))
            .collect();
        json!([
            self.names,
            paths,
            self.links,
            self.folders,
            self.entrypoint,
            self.user,
            self.labels
        ])
        .to_string()
    }

    /// Writes the layer as a tar file, and returns its digest in hexadecimal.
    pub(crate) fn write_layer(&self, file: &Path) -> Result<String> {
        let mut layer = tar::Builder::new(Hashing {
            file: File::create(file)?,
            hash: Sha256::new(),
        });
        for (folder, mode) in self.all_folders() {
            let mut header = header(mode, 0);
            header.set_entry_type(tar::EntryType::Directory);
            layer.append_data(&mut header, format!("{folder}/"), io::empty())?;
        }
        for entry in &self.entries {
            let mut source =
                File::open(&entry.source).with_context(|| entry.source.display().to_string())?;
            let size = source.metadata()?.len();
            append(&mut layer, &entry.path, entry.mode, size, &mut source)?;
        }
        for (path, target) in &self.links {
            let mut header = header(0o777, 0);
            header.set_entry_type(tar::EntryType::Symlink);
            layer
                .append_link(&mut header, path, target)
                .with_context(|| path.clone())?;
        }
        let mut hashing = layer.into_inner()?;
        hashing.flush()?;
        Ok(hex::encode(hashing.hash.finalize()))
    }

    /// All folders of the image. Each folder comes before the folders in it.
    fn all_folders(&self) -> Vec<(String, u32)> {
        let parents = self
            .entries
            .iter()
            .filter_map(|entry| Some(entry.path.rsplit_once('/')?.0));
        let mut all: Vec<String> = Vec::new();
        for path in parents
            .chain(self.folders.iter().map(String::as_str))
            .chain(["tmp", "etc"])
        {
            let ends = path
                .match_indices('/')
                .map(|(at, _)| at)
                .chain([path.len()]);
            all.extend(ends.map(|end| path[..end].to_owned()));
        }
        all.sort();
        all.dedup();
        all.into_iter()
            .map(|folder| {
                let mode = if folder == "tmp" { 0o1777 } else { 0o755 };
                (folder, mode)
            })
            .collect()
    }

    /// The configuration of the image, in the common format of Docker and OCI. `layer` is the digest of the layer
    /// before compression.
    pub(crate) fn config(&self, layer: &str) -> String {
        let labels: serde_json::Map<_, _> = self
            .labels
            .iter()
            .map(|(key, value)| (key.clone(), json!(value)))
            .collect();
        let mut config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Env": ["PATH=/usr/local/bin"],
                "Labels": labels,
                "User": self.user,
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer}")] },
            "history": [{ "created_by": "xtask" }],
        });
        if let Some(created) = &self.created {
            config["created"] = json!(created);
        }
        config.to_string()
    }
}

/// The architecture of this machine in the terms of container images, such as `amd64`.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A tar header with fixed time, owner and group, so that archives are reproducible.
pub(crate) fn header(mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Adds a file to a tar archive.
pub(crate) fn append<W: Write>(
    archive: &mut tar::Builder<W>,
    path: &str,
    mode: u32,
    size: u64,
    data: impl io::Read,
) -> Result<()> {
    archive
        .append_data(&mut header(mode, size), path, data)
        .with_context(|| path.to_owned())
}

struct Hashing {
    file: File,
    hash: Sha256,
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read as _;

    use super::*;

    fn image(dir: &Path) -> Image {
        fs::write(dir.join("program"), "content").unwrap();
        Image {
            names: vec!["localhost/x:1".into()],
            entries: vec![Entry::program(&dir.join("program"), "usr/local/bin/x")],
            links: vec![("usr/local/bin/y".into(), "x".into())],
            user: "65532:65532".into(),
            labels: vec![("a".into(), "b".into())],
            ..Image::default()
        }
    }

    fn files(tar: impl io::Read) -> Vec<(String, u32, Vec<u8>)> {
        let mut archive = tar::Archive::new(tar);
        archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let (path, mode) = (
                    entry.path().unwrap().display().to_string(),
                    entry.header().mode().unwrap(),
                );
                let mut data = Vec::new();
                entry.read_to_end(&mut data).unwrap();
                (path, mode, data)
            })
            .collect()
    }

    #[test]
    fn image_manifest_names_config_and_layer_by_digest() {
        let dir = tempfile::tempdir().unwrap();
        let tar = dir.path().join("image.tar");
        let digest = image(dir.path()).write(&tar).unwrap();
        let outer = files(File::open(&tar).unwrap());
        let find = |name: &str| &outer.iter().find(|(path, ..)| path == name).unwrap().2;
        let manifest: serde_json::Value = serde_json::from_slice(find("manifest.json")).unwrap();
        assert_eq!(manifest[0]["RepoTags"][0], "localhost/x:1");
        assert_eq!(manifest[0]["Layers"][0], format!("{digest}/layer.tar"));
        let config = find(manifest[0]["Config"].as_str().unwrap());
        assert_eq!(
            manifest[0]["Config"],
            format!("{}.json", hex::encode(Sha256::digest(config)))
        );
        let config: serde_json::Value = serde_json::from_slice(config).unwrap();
        assert_eq!(config["config"]["User"], "65532:65532");
        let layer = find(&format!("{digest}/layer.tar"));
        assert_eq!(
            config["rootfs"]["diff_ids"][0],
            format!("sha256:{}", hex::encode(Sha256::digest(layer)))
        );
    }

    #[test]
    fn image_layer_lists_folders_before_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let layer = dir.path().join("layer");
        image(dir.path()).write_layer(&layer).unwrap();
        let inner = files(File::open(&layer).unwrap());
        let paths: Vec<&str> = inner
            .iter()
            .map(|(path, ..)| path.trim_end_matches('/'))
            .collect();
        assert_eq!(
            paths,
            [
                "etc",
                "tmp",
                "usr",
                "usr/local",
                "usr/local/bin",
                "usr/local/bin/x",
                "usr/local/bin/y"
            ]
        );
        assert_eq!(inner[1].1, 0o1777);
        assert_eq!(inner[5].1, 0o755);
        assert_eq!(inner[5].2, b"content");
    }

    #[test]
    fn links_in_image_layer_are_symlinks_to_their_target() {
        let dir = tempfile::tempdir().unwrap();
        let layer = dir.path().join("layer");
        image(dir.path()).write_layer(&layer).unwrap();
        let mut archive = tar::Archive::new(File::open(&layer).unwrap());
        let link = archive
            .entries()
            .unwrap()
            .map(Result::unwrap)
            .last()
            .unwrap();
        assert_eq!(link.header().entry_type(), tar::EntryType::Symlink);
        assert_eq!(link.link_name().unwrap().unwrap(), Path::new("x"));
    }

    #[test]
    fn docker_archives_are_reproducible() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a.tar"), dir.path().join("b.tar"));
        image(dir.path()).write(&a).unwrap();
        image(dir.path()).write(&b).unwrap();
        assert_eq!(fs::read(a).unwrap(), fs::read(b).unwrap());
    }
}
