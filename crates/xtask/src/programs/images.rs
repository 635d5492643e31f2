//! The images for the nodes of the testbed: etcd and the pause image. Writes them as archives to the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{RECIPE, cached, digest};
use crate::archive::{Entry, Image};
use crate::shell;

pub(super) fn pause(init: &Path) -> Image {
    Image {
        names: vec!["docker.io/testbed/pause:1".into()],
        entries: vec![Entry::program(init, "pause")],
        entrypoint: vec!["/pause".into()],
        user: "65535:65535".into(),
        ..Image::default()
    }
}

/// Writes an etcd image like the official image: the programs are in /usr/local/bin, and there is no shell.
pub(super) fn etcd(cache: &Path, version: &str, folder: &Path) -> Result<PathBuf> {
    let mut entries = Vec::new();
    for program in ["etcd", "etcdctl", "etcdutl"] {
        let path = folder.join(program);
        if path.is_file() {
            entries.extend(libraries(&path)?);
            entries.push(Entry::program(&path, &format!("usr/local/bin/{program}")));
        }
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    entries.dedup_by(|a, b| a.path == b.path);
    let names = ["quay.io/coreos/etcd", "gcr.io/etcd-development/etcd"]
        .map(|name| format!("{name}:v{version}"));
    let image = Image {
        names: names.into(),
        entries,
        folders: vec!["var/etcd".into()],
        ..Image::default()
    };
    archive(cache, &format!("etcd-{version}"), &image)
}

/// The shared libraries of the program, as listed by `ldd`.
fn libraries(program: &Path) -> Result<Vec<Entry>> {
    let Ok(text) = shell::output(Command::new("ldd").arg(program)) else {
        // `ldd` fails for a static program, which needs no libraries.
        return Ok(Vec::new());
    };
    parse_ldd(&text)
        .into_iter()
        .map(|library| {
            let file = fs::canonicalize(library).with_context(|| library.to_owned())?;
            Ok(Entry::program(&file, library.trim_start_matches('/')))
        })
        .collect()
}

fn parse_ldd(text: &str) -> Vec<&str> {
    text.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .collect()
}

pub(super) fn archive(cache: &Path, name: &str, image: &Image) -> Result<PathBuf> {
    let sources: Vec<&[u8]> = image
        .entries
        .iter()
        .map(|entry| entry.source.as_os_str().as_encoded_bytes())
        .collect();
    let settings = image.settings();
    let key = digest(&[sources, vec![settings.as_bytes(), RECIPE.as_bytes()]].concat());
    let folder = cached(cache, &format!("image-{name}"), &key, |folder| {
        image.write(&folder.join("image.tar")).map(|_| ())
    })?;
    let file = folder.join("image.tar");
    if !file.is_file() {
        bail!("{} is incomplete: remove it", folder.display());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_output_is_parsed_without_vdso() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00)\n\t/lib64/ld-linux-x86-64.so.2 (0x00)\n";
        assert_eq!(
            parse_ldd(text),
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
    }
}
