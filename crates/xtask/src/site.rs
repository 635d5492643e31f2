//! The command `site`: builds the documentation site with mdBook, and checks the links and anchors of its pages. It
//! publishes nothing.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{checkout, programs, progress, shell};

mod links;
mod pages;

#[cfg(test)]
pub(crate) use pages::write;

/// The time between two searches for changed pages while the site is served.
const REFRESH: Duration = Duration::from_secs(1);
/// A file of every mdBook site. The output folder is replaced only if it is empty or contains this file.
const MARK: &str = "toc.html";

/// Options of `site`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Folder of the site [default: site in the target directory]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Open the built site in a browser.
    #[arg(long)]
    open: bool,
    /// Serve the site on this machine until the command is interrupted, and rebuild changed pages. Links are not
    /// checked.
    #[arg(long, conflicts_with = "out")]
    serve: bool,
    /// Port of --serve.
    #[arg(long, value_name = "PORT", default_value_t = 3000, requires = "serve")]
    port: u16,
}

/// Builds and checks the site, or serves it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mdbook = programs::mdbook()?;
    let target = checkout::target()?;
    let work = target.join("site-work");
    let _ = fs::remove_dir_all(&work);
    pages::write(&checkout::root(), &work)?;
    if options.serve {
        return serve(&mdbook, &work, options);
    }
    let hyperlink = programs::hyperlink()?;
    let out = match &options.out {
        Some(folder) => std::path::absolute(folder)?,
        None => target.join("site"),
    };
    check_out(&out)?;
    let mut build = Command::new(&mdbook);
    build.arg("build").arg(&work).arg("--dest-dir").arg(&out);
    if options.open {
        build.arg("--open");
    }
    shell::output(&mut build)?;
    let mut check = Command::new(&hyperlink);
    // The output of the link checker goes to standard error, because `cargo xtask site` prints only the folder of the
    // site to standard output.
    check.arg("--check-anchors").arg(&out).stdout(io::stderr());
    shell::inherit(&mut check).context("the site has dead links")?;
    progress::say("the site is in");
    println!("{}", out.display());
    Ok(())
}

/// Rejects an output folder with files that do not belong to a site, because mdBook empties the folder.
fn check_out(folder: &Path) -> Result<()> {
    let is_used = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    if is_used && !folder.join(MARK).is_file() {
        bail!(
            "{} contains other files: select another folder with --out",
            folder.display()
        );
    }
    Ok(())
}

/// Serves the site. Each changed page is copied again, because mdBook watches only the copies.
fn serve(mdbook: &Path, work: &Path, options: &Options) -> Result<()> {
    // An empty .gitignore in `work` makes mdBook watch the files in `work`. mdBook ignores files that a .gitignore
    // excludes, and the .gitignore of the checkout excludes the target directory, which contains `work`.
    let ignored = work.join(".gitignore");
    fs::write(&ignored, "").with_context(|| ignored.display().to_string())?;
    let copies = work.to_path_buf();
    thread::spawn(move || {
        loop {
            thread::sleep(REFRESH);
            if let Err(error) = pages::write(&checkout::root(), &copies) {
                progress::say(&format!("{error:#}"));
            }
        }
    });
    let mut command = Command::new(mdbook);
    command.arg("serve").arg(work);
    command.args(["--port", &options.port.to_string()]);
    if options.open {
        command.arg("--open");
    }
    shell::inherit(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonempty_folder_without_site_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        check_out(folder.path()).unwrap();
        fs::write(folder.path().join("index.html"), "").unwrap();
        let error = check_out(folder.path()).unwrap_err().to_string();
        assert!(error.contains("--out"), "{error}");
        fs::write(folder.path().join(MARK), "").unwrap();
        check_out(folder.path()).unwrap();
    }
}
