//! Writes and reads an OCI image archive: a tar file with an image index, and a manifest, a configuration and a layer
//! for each architecture. The bytes depend only on the content.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::archive::{Image, append, architecture};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const BLOBS: &str = "blobs/sha256/";

/// The descriptors of the manifests, and all blobs by their digest in hexadecimal.
#[derive(Debug, Default)]
struct Content {
    manifests: Vec<Value>,
    blobs: BTreeMap<String, Vec<u8>>,
}

impl Content {
    /// Adds a blob, and returns its descriptor.
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let digest = hex::encode(Sha256::digest(&bytes));
        let descriptor = json!({
            "mediaType": media_type,
            "digest": format!("sha256:{digest}"),
            "size": bytes.len(),
        });
        self.blobs.insert(digest, bytes);
        descriptor
    }

    fn blob(&self, descriptor: &Value) -> Result<&[u8]> {
        let digest = descriptor["digest"].as_str().unwrap_or_default();
        let found = self.blobs.get(digest.trim_start_matches("sha256:"));
        Ok(found.with_context(|| format!("the archive has no blob {digest}"))?)
    }
}

/// The properties of a written archive.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// The digest of the image index: `sha256:...`.
    pub(crate) digest: String,
    pub(crate) architectures: Vec<String>,
    /// The size of the largest layer before compression, in bytes.
    pub(crate) layer: u64,
}

/// Compresses bytes with gzip, without a time or a name in the header.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzBuilder::new().write(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// Writes the image for this machine's architecture, and adds the images in the archives `others`. `reference` is the
/// name of the image with its tag.
pub(crate) fn write(
    image: &Image,
    reference: &str,
    others: &[PathBuf],
    file: &Path,
) -> Result<Written> {
    let mut content = Content::default();
    let layer = add_image(&mut content, image, &file.with_extension("layer"))?;
    for other in others {
        let read = read(other).with_context(|| other.display().to_string())?;
        content.manifests.extend(read.manifests);
        content.blobs.extend(read.blobs);
    }
    content.manifests.sort_by_key(architecture_of);
    let architectures: Vec<String> = content.manifests.iter().map(architecture_of).collect();
    let mut seen = BTreeSet::new();
    if let Some(twice) = architectures.iter().find(|it| !seen.insert(*it)) {
        bail!(
            "two images have the architecture {twice}: --add-image takes images of other architectures"
        );
    }
    let annotations: BTreeMap<_, _> = image.labels.iter().cloned().collect();
    let index = json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": content.manifests,
        "annotations": annotations,
    });
    let mut descriptor = content.add(INDEX, index.to_string().into_bytes());
    let digest = descriptor["digest"].as_str().unwrap_or_default().to_owned();
    let tag = reference.rsplit(':').next().unwrap_or_default();
    descriptor["annotations"] = json!({
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": tag,
    });
    write_archive(&content, &descriptor, file)
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(Written {
        digest,
        architectures,
        layer,
    })
}

fn architecture_of(descriptor: &Value) -> String {
    let text = descriptor["platform"]["architecture"].as_str();
    text.unwrap_or_default().to_owned()
}

/// Adds the image, and returns the size of its layer before compression.
fn add_image(content: &mut Content, image: &Image, temporary: &Path) -> Result<u64> {
    let digest = image.write_layer(temporary)?;
    let layer = fs::read(temporary)?;
    fs::remove_file(temporary)?;
    let config = content.add(CONFIG, image.config(&digest).into_bytes());
    let compressed = content.add(LAYER, gzip(&layer)?);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [compressed],
    });
    let mut descriptor = content.add(MANIFEST, manifest.to_string().into_bytes());
    descriptor["platform"] = json!({ "architecture": architecture(), "os": "linux" });
    content.manifests.push(descriptor);
    Ok(layer.len() as u64)
}

fn write_archive(content: &Content, index: &Value, file: &Path) -> Result<()> {
    let mut archive = tar::Builder::new(File::create(file)?);
    let mut add =
        |path: &str, bytes: &[u8]| append(&mut archive, path, 0o644, bytes.len() as u64, bytes);
    add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let top = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [index] });
    add("index.json", top.to_string().as_bytes())?;
    for (digest, bytes) in &content.blobs {
        add(&format!("{BLOBS}{digest}"), bytes)?;
    }
    archive.into_inner()?.flush()?;
    Ok(())
}

/// Reads an archive that [`write`] has written. The result does not contain the image index.
fn read(file: &Path) -> Result<Content> {
    let mut content = Content::default();
    let mut top = None;
    for entry in tar::Archive::new(File::open(file)?).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.display().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        if let Some(digest) = path.strip_prefix(BLOBS) {
            if hex::encode(Sha256::digest(&bytes)) != digest {
                bail!("the blob {digest} is damaged: build the archive again");
            }
            content.blobs.insert(digest.to_owned(), bytes);
        } else if path == "index.json" {
            top = Some(serde_json::from_slice::<Value>(&bytes)?);
        }
    }
    let top = top.context("not an archive of `cargo xtask dist`: index.json is missing")?;
    let outer = &top["manifests"][0];
    let index: Value = serde_json::from_slice(content.blob(outer)?)?;
    let digest = outer["digest"].as_str().unwrap_or_default();
    content.blobs.remove(digest.trim_start_matches("sha256:"));
    let manifests = index["manifests"].as_array();
    let manifests = manifests.context("the image index is missing")?;
    content.manifests.clone_from(manifests);
    Ok(content)
}

#[cfg(test)]
mod tests {
    use flate2::read::GzDecoder;

    use super::*;
    use crate::archive::Entry;

    fn image(folder: &Path, text: &str) -> Image {
        let program = folder.join("program");
        fs::write(&program, text).unwrap();
        Image {
            entries: vec![Entry::program(&program, "usr/local/bin/x")],
            user: "65532:65532".into(),
            labels: vec![("a".into(), "b".into())],
            created: Some("2026-11-01T00:00:00Z".into()),
            ..Image::default()
        }
    }

    /// An archive of the image for the architecture `other`.
    fn of_other_architecture(folder: &Path) -> PathBuf {
        let mut content = Content::default();
        add_image(&mut content, &image(folder, "other"), &folder.join("l")).unwrap();
        content.manifests[0]["platform"]["architecture"] = json!("other");
        let index = json!({ "manifests": content.manifests });
        let descriptor = content.add(INDEX, index.to_string().into_bytes());
        let file = folder.join("other.tar");
        write_archive(&content, &descriptor, &file).unwrap();
        file
    }

    #[test]
    fn image_manifest_refers_to_configuration_and_layer() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image.tar");
        let written = write(&image(dir.path(), "program"), "r/x:1", &[], &file).unwrap();
        let content = read(&file).unwrap();
        assert_eq!(written.architectures, [architecture()]);
        let manifest: Value =
            serde_json::from_slice(content.blob(&content.manifests[0]).unwrap()).unwrap();
        let config: Value =
            serde_json::from_slice(content.blob(&manifest["config"]).unwrap()).unwrap();
        assert_eq!(config["config"]["User"], "65532:65532");
        assert_eq!(config["created"], "2026-11-01T00:00:00Z");
        let mut layer = Vec::new();
        GzDecoder::new(content.blob(&manifest["layers"][0]).unwrap())
            .read_to_end(&mut layer)
            .unwrap();
        assert_eq!(written.layer, layer.len() as u64);
        let diff = format!("sha256:{}", hex::encode(Sha256::digest(&layer)));
        assert_eq!(config["rootfs"]["diff_ids"][0], diff.as_str());
    }

    #[test]
    fn image_archives_are_reproducible() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a.tar"), dir.path().join("b.tar"));
        let first = write(&image(dir.path(), "program"), "r/x:1", &[], &a).unwrap();
        let second = write(&image(dir.path(), "program"), "r/x:1", &[], &b).unwrap();
        assert_eq!(first, second);
        assert_eq!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
        let other = write(&image(dir.path(), "changed"), "r/x:1", &[], &b).unwrap();
        assert_ne!(first.digest, other.digest);
    }

    #[test]
    fn image_index_contains_one_image_for_each_architecture() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image.tar");
        let others = [of_other_architecture(dir.path())];
        let image = image(dir.path(), "program");
        let written = write(&image, "r/x:1", &others, &file).unwrap();
        assert_eq!(written.architectures, [architecture(), "other"]);
        assert_eq!(read(&file).unwrap().manifests.len(), 2);
        // `image` and the image in `file` have the same architecture, so no image index can contain both.
        let twice = write(&image, "r/x:1", &[file], &dir.path().join("b.tar"));
        let error = twice.unwrap_err().to_string();
        assert!(error.contains(architecture()), "{error}");
    }

    #[test]
    fn damaged_image_archive_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image.tar");
        write(&image(dir.path(), "program"), "r/x:1", &[], &file).unwrap();
        let mut bytes = fs::read(&file).unwrap();
        // The first two files of the archive are not blobs. The last `}]` comes after these two files, so the damaged
        // byte is in a blob.
        let at = bytes.windows(2).rposition(|pair| pair == b"}]").unwrap();
        bytes[at] = b' ';
        fs::write(&file, bytes).unwrap();
        let error = read(&file).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
    }
}
