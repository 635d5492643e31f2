//! Compiles the programs of a release. The result depends only on the source and the toolchain, not on the paths of
//! this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{checkout, image, shell};

/// The section of `.cargo/config.toml` with the compiler flags. Cargo appends the flags of this module to them.
const SECTION: &str = r#"target.'cfg(all(target_os = "linux", target_env = "gnu"))'.rustflags"#;

/// Compiles the operators and the kubectl plugin with the profile `release`.
pub(crate) fn compile() -> Result<Vec<PathBuf>> {
    let folders = folders()?;
    let flags = flags(&folders);
    let config = format!("{SECTION}={}", serde_json::to_string(&flags)?);
    let args = [
        "build",
        "--locked",
        "--profile=release",
        "--package=operators",
        "--package=kubectl-etcd",
        "--bins",
        "--config",
        &config,
    ];
    let programs = image::cargo_executables(&args)?;
    for program in &programs {
        check_folders(program, &folders)?;
    }
    Ok(programs)
}

/// Rejects a program that contains the path of one of `folders`, because the same commit would give another program on
/// a machine with other paths. Paths with only one component, such as `/src`, are not checked, because they also occur
/// in other paths.
fn check_folders(program: &Path, folders: &[(PathBuf, &str)]) -> Result<()> {
    let bytes = fs::read(program).with_context(|| program.display().to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    for (folder, _) in folders {
        let path = format!("{}/", folder.display());
        if path.matches('/').count() < 3 {
            continue;
        }
        if let Some(at) = text.find(&path) {
            let found: String = text[at..]
                .chars()
                .take_while(char::is_ascii_graphic)
                .take(120)
                .collect();
            bail!(
                "{} contains a path of this machine, {found}: the build would differ in another directory. Add the compiler flag that replaces the path",
                program.display()
            );
        }
    }
    Ok(())
}

/// The version of the compiler, on one line.
pub(crate) fn compiler() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    Ok(shell::output(Command::new(rustc).arg("--version"))?
        .trim()
        .to_owned())
}

/// Folders of this machine whose paths the compiler would write into the program, each with its replacement path.
fn folders() -> Result<Vec<(PathBuf, &'static str)>> {
    let home = std::env::var_os("HOME").context("HOME is not set")?;
    let cargo = std::env::var_os("CARGO_HOME")
        .map_or_else(|| Path::new(&home).join(".cargo"), PathBuf::from);
    let sysroot = shell::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
    Ok(vec![
        (cargo, "/cargo"),
        (checkout::root(), "/source"),
        // The target directory comes after the checkout, because it is often below the checkout, and rustc uses the
        // last `--remap-path-prefix` that matches.
        (checkout::target()?, "/target"),
        (library, "/rustc"),
    ])
}

fn flags(folders: &[(PathBuf, &str)]) -> Vec<String> {
    let remap = |(folder, name): &(PathBuf, &str)| {
        format!("--remap-path-prefix={}={name}", folder.display())
    };
    folders.iter().map(remap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_configuration_has_section_with_compiler_flags() {
        let text = fs::read_to_string(checkout::root().join(".cargo/config.toml")).unwrap();
        let section = SECTION.trim_end_matches(".rustflags");
        assert!(text.contains(&format!("[{section}]\nrustflags")), "{text}");
    }

    #[test]
    fn program_that_contains_local_path_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        let folders = [
            (PathBuf::from("/home/ci/.cargo"), "/cargo"),
            (PathBuf::from("/src"), "/source"),
        ];
        fs::write(&program, b"\xff\0/cargo/a.rs\0/x/src/b.rs\0/home/ci\0").unwrap();
        check_folders(&program, &folders).unwrap();
        fs::write(&program, b"\xff\0panic/home/ci/.cargo/a/b.rs\0c").unwrap();
        let error = check_folders(&program, &folders).unwrap_err().to_string();
        assert!(error.contains("/home/ci/.cargo/a/b.rs:"), "{error}");
    }

    #[test]
    fn target_directory_path_is_remapped_after_checkout_path() {
        let flags = flags(&folders().unwrap());
        let at = |name: &str| flags.iter().position(|flag| flag.ends_with(name)).unwrap();
        assert!(at("=/source") < at("=/target"), "{flags:?}");
    }

    #[test]
    fn release_profile_unwinds_panics_checks_overflow_and_strips_symbols() {
        let text = fs::read_to_string(checkout::root().join("Cargo.toml")).unwrap();
        let (_, profile) = text.split_once("[profile.release]").unwrap();
        for line in [
            "panic = \"unwind\"",
            "overflow-checks = true",
            "strip = \"symbols\"",
        ] {
            assert!(profile.contains(line), "{line}");
        }
    }
}
