//! The software bill of materials (SBOM), which cargo-cyclonedx creates.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::names::Release;
use crate::shell;

/// The environment variable with the time in the SBOM. Without it, the SBOM would contain the time of the build.
const TIME_VARIABLE: &str = "SOURCE_DATE_EPOCH";

/// The SBOM of the operators for this machine's platform. `copy` must be a copy of the source, because the tool writes
/// to the folders of all crates.
pub(super) fn create(tool: &Path, copy: &Path, release: &Release) -> Result<String> {
    let time = shell::output(
        Command::new("git")
            .args(["log", "-1", "--format=%ct"])
            .current_dir(copy),
    )?;
    let mut command = Command::new(tool);
    command
        .args(["cyclonedx", "--format=json", "--spec-version=1.5", "--all"])
        .args(["--override-filename=bom", "-qq"])
        .current_dir(copy)
        .env(TIME_VARIABLE, time.trim());
    shell::output(&mut command)?;
    let file = copy.join("crates/operators/bom.json");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    normalized(&text, copy, &release.version)
}

/// Sets the version of the release in the SBOM, and removes the path of `copy`.
fn normalized(text: &str, copy: &Path, version: &str) -> Result<String> {
    let folder = format!("file://{}", copy.display());
    let text = text.replace(&folder, "file:///source");
    let mut document: Value = serde_json::from_str(&text).context("the bill of materials")?;
    document["metadata"]["component"]["version"] = json!(version);
    Ok(format!("{}\n", serde_json::to_string_pretty(&document)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bill_of_materials_contains_no_local_path() {
        let text = r#"{"metadata":{"component":{"version":"0.1.0","bom-ref":"path+file:///home/a/x/crates/b#0.1.0"}}}"#;
        let normal = normalized(text, Path::new("/home/a/x"), "0.1.0-rc.1").unwrap();
        assert!(!normal.contains("/home"), "{normal}");
        assert!(
            normal.contains("path+file:///source/crates/b#0.1.0"),
            "{normal}"
        );
        assert!(normal.contains(r#""version": "0.1.0-rc.1""#), "{normal}");
    }
}
