//! `cargo xtask dist` writes all files of a release to a folder. It publishes nothing; docs/contributing/releasing.md
//! describes the other steps of a release.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

mod chart;
mod krew;
mod listing;
mod names;
mod olm;
mod provenance;
mod sbom;
#[cfg(test)]
mod tests;

use self::chart::Text;
use self::listing::Sum;
use self::names::Release;
use crate::image::Profile;
use crate::origin::{self, Origin};
use crate::packages::{Purpose, ensure_packages};
use crate::{checkout, image, oci, programs, progress, release, shell};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Registry and name of the released image, for example registry.example.com/etcd-operator.
    ///
    /// The chart and the manifests contain the tag and the digest of the image. Without this option, they use
    /// localhost/etcd-operator, which you must load into the nodes.
    #[arg(long, value_name = "REGISTRY/NAME")]
    repository: Option<String>,
    /// Version of the release: the version of the workspace, with an optional suffix such as -rc.1.
    #[arg(long, value_name = "VERSION", default_value = origin::VERSION)]
    version: String,
    /// URL of the source repository, for labels and provenance [default: the https URL of the git remote `origin`]
    #[arg(long, value_name = "URL")]
    source: Option<String>,
    /// URI of the builder in the provenance statement.
    #[arg(long, value_name = "URI", default_value = provenance::LOCAL_BUILDER)]
    builder: String,
    /// Add the image of another architecture. FILE is an archive that `dist` wrote on another machine.
    #[arg(long = "add-image", value_name = "FILE")]
    others: Vec<PathBuf>,
    /// Add the plugin of another architecture. FILE is an archive that `dist` wrote on another machine.
    #[arg(long = "add-plugin", value_name = "FILE")]
    plugins: Vec<PathBuf>,
    /// URL under which you publish the files, for the manifest of the plugin [default:
    /// SOURCE/releases/download/vVERSION]
    #[arg(long, value_name = "URL")]
    files_url: Option<String>,
    /// Folder for the files [default: dist in the target directory]
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Compilation profile. With `fast`, the files are not suitable for a release.
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// Build everything again in a second checkout and target directory, and compare the files. This doubles the time.
    #[arg(long)]
    verify_reproducible: bool,
}

/// Writes the files of a release.
pub(crate) fn run(options: &Options) -> Result<()> {
    check(options)?;
    ensure_packages(&[Purpose::Build])?;
    let output = match &options.output {
        Some(folder) => std::path::absolute(folder)?,
        None => checkout::target()?.join("dist"),
    };
    check_output(&output)?;
    let work = checkout::target()?.join("dist-work");
    let new = output.with_extension("new");
    for folder in [&work, &new] {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    write(options, &work, &new)?;
    let _ = fs::remove_dir_all(&output);
    fs::rename(&new, &output).with_context(|| output.display().to_string())?;
    if options.verify_reproducible {
        verify(options, &work, &output)?;
    }
    fs::remove_dir_all(&work).with_context(|| work.display().to_string())?;
    report(&output)
}

/// Rejects options with which no release can be written.
fn check(options: &Options) -> Result<()> {
    origin::check_version(&options.version)?;
    if let Some(repository) = &options.repository {
        check_repository(repository)?;
    }
    let url = options.files_url.as_deref();
    if let Some(url) = url.filter(|url| !url.starts_with("https://")) {
        bail!("--files-url {url} does not begin with https://");
    }
    if options.profile == Profile::Fast {
        progress::say("profile fast: the files are a trial, and not a release");
        if options.verify_reproducible {
            bail!(
                "--verify-reproducible requires --profile release: a program of the fast profile contains directory paths of this machine"
            );
        }
    } else if origin::is_modified()? {
        bail!(
            "the checkout has changes that are in no commit: commit or remove them (`git status`), or use --profile fast for a trial"
        );
    }
    Ok(())
}

/// Rejects a repository with a tag, a digest or a scheme, because `dist` adds the tag and the digest.
fn check_repository(repository: &str) -> Result<()> {
    let (_, name) = repository.rsplit_once('/').unwrap_or_default();
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    if name.is_empty() || !name.chars().all(good) || repository.contains("//") {
        bail!(
            "--repository {repository} is not of the form REGISTRY/NAME, for example registry.example.com/etcd-operator"
        );
    }
    Ok(())
}

/// Rejects a folder with files that are not an earlier release, because `dist` replaces the whole folder.
fn check_output(folder: &Path) -> Result<()> {
    let is_empty = |mut entries: fs::ReadDir| entries.next().is_none();
    if !folder.join(listing::SUMS).is_file() && fs::read_dir(folder).is_ok_and(|it| !is_empty(it)) {
        bail!(
            "{} contains other files: select another folder with --output",
            folder.display()
        );
    }
    Ok(())
}

/// Writes the files of the release to the empty folder `new`.
fn write(options: &Options, work: &Path, new: &Path) -> Result<()> {
    // `Origin::of_checkout` calls git before the first file is written, because the new files would make git report a
    // modified checkout.
    let origin = Origin::of_checkout(&options.version, options.source.as_deref())?;
    if origin.source.is_none() {
        progress::say(
            "the labels and the provenance of the release will not name the source, and without --files-url the manifest of the plugin will be missing: set --source URL",
        );
    }
    let helm = programs::helm()?;
    let olm_validate = programs::olm_validate()?;
    let cyclonedx = programs::cyclonedx()?;
    let built = match options.profile {
        Profile::Release => release::compile()?,
        Profile::Fast => image::compile()?,
    };
    let mut release = Release {
        version: options.version.clone(),
        repository: options
            .repository
            .clone()
            .unwrap_or_else(|| image::NAME.into()),
        digest: None,
        files: files_url(options, &origin),
        plugins: Vec::new(),
        origin,
    };
    let archive = new.join(release.image_archive());
    let written = progress::step("writing the image", || {
        let content = image::content(&built, &release.origin)?;
        oci::write(&content, &release.image_name(), &options.others, &archive)
    })?;
    progress::say(&format!(
        "image for {}: {}, compressed {}",
        written.architectures.join(" and "),
        image::megabytes(written.layer),
        image::megabytes(fs::metadata(&archive)?.len()),
    ));
    if options.profile == Profile::Release {
        image::check_size(written.layer)?;
    }
    release.digest = options.repository.as_ref().map(|_| written.digest);
    release.plugins = progress::step("writing the plugin of kubectl", || {
        krew::write(&release, &built, &options.plugins, new)
    })?;
    let chart = chart::released(chart::files()?, &release)?;
    write_manifests(&release, &chart, &helm, new)?;
    progress::step("writing the bundle for OLM", || {
        write_bundle(&release, &chart, (&helm, &olm_validate), work, new)
    })?;
    let copy = work.join("source");
    clone(&copy)?;
    let bill = progress::step("writing the software bill of materials", || {
        sbom::create(&cyclonedx, &copy, &release)
    })?;
    put(new, &release.sbom(), &bill)?;
    put(new, listing::README, listing::readme(&release))?;
    let sums = listing::sums(new)?;
    let statement =
        provenance::statement(&release, &options.builder, &inputs(options, &helm)?, &sums)?;
    put(new, listing::PROVENANCE, &statement)?;
    put(new, listing::SUMS, listing::text(&listing::sums(new)?))
}

/// The URL under which the files are published. `None` if unknown.
fn files_url(options: &Options, origin: &Origin) -> Option<String> {
    let source = origin.source.as_ref();
    let page = source.map(|source| format!("{source}/releases/download/v{}", options.version));
    let given = options.files_url.as_deref();
    given
        .map(|url| url.trim_end_matches('/').to_owned())
        .or(page)
}

/// Writes the chart, the CRDs, and the manifests rendered from the chart.
fn write_manifests(release: &Release, files: &[Text], helm: &Path, new: &Path) -> Result<()> {
    put(new, &release.chart(), chart::package(files)?)?;
    put(new, listing::CRDS, chart::crds(files))?;
    let package = new.join(release.chart());
    progress::step("checking the chart", || chart::lint(helm, &package))?;
    for (name, manifest) in [
        (listing::INSTALL, &chart::NAMESPACED),
        (listing::INSTALL_CLUSTER_WIDE, &chart::CLUSTER_WIDE),
    ] {
        put(new, name, chart::render(helm, &package, manifest)?)?;
    }
    Ok(())
}

/// Writes the bundle for OLM. Fails if the validators of the operator framework reject it.
fn write_bundle(
    release: &Release,
    chart: &[Text],
    (helm, validate): (&Path, &Path),
    work: &Path,
    new: &Path,
) -> Result<()> {
    let rendered = chart::render(helm, &new.join(release.chart()), &olm::RENDERING)?;
    let files = olm::files(release, chart, &rendered)?;
    for warning in olm::validate(validate, &files, &work.join("bundle"))? {
        progress::say(&format!("bundle for OLM: {warning}"));
    }
    put(new, &release.bundle(), chart::tgz("", &files)?)
}

fn put(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> Result<()> {
    let file = folder.join(name);
    fs::write(&file, content).with_context(|| file.display().to_string())
}

/// Clones the current commit of the checkout to `folder`.
fn clone(folder: &Path) -> Result<()> {
    let mut command = Command::new("git");
    command.args(["clone", "--quiet", "--shared"]);
    shell::output(command.arg(checkout::root()).arg(folder)).map(|_| ())
}

/// The inputs of the build for the provenance statement.
fn inputs(options: &Options, helm: &Path) -> Result<provenance::Inputs> {
    let first_line = |program: &Path, args: &[&str]| -> Result<String> {
        let text = shell::output(Command::new(program).args(args))?;
        Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    let tools = vec![
        ("rustc", release::compiler()?),
        ("gcc", first_line(Path::new("gcc"), &["--version"])?),
        ("libc", first_line(Path::new("ldd"), &["--version"])?),
        ("helm", first_line(helm, &["version", "--short"])?),
        ("cargo-cyclonedx", programs::CYCLONEDX.to_owned()),
    ];
    let mut files = vec![listing::sum(
        &checkout::root().join("Cargo.lock"),
        "Cargo.lock",
    )?];
    let certificates = Path::new(image::CERTIFICATES);
    if certificates.is_file() {
        files.push(listing::sum(certificates, "ca-certificates.crt")?);
    }
    for other in options.others.iter().chain(&options.plugins) {
        let name = other.file_name().unwrap_or_default().to_string_lossy();
        files.push(listing::sum(other, &name)?);
    }
    Ok(provenance::Inputs { tools, files })
}

/// Builds the release again in another folder with an empty target directory, and compares the files.
fn verify(options: &Options, work: &Path, output: &Path) -> Result<()> {
    let again = work.join("again");
    let (source, files) = (again.join("source"), again.join("dist"));
    clone(&source)?;
    let mut command = Command::new(image::cargo());
    command.args(["xtask", "dist", "--version", &options.version]);
    command
        .args(["--builder", &options.builder, "--output"])
        .arg(&files);
    if let Some(repository) = &options.repository {
        command.args(["--repository", repository]);
    }
    let origin = Origin::of_checkout(&options.version, options.source.as_deref())?;
    if let Some(address) = &origin.source {
        command.args(["--source", address]);
    }
    if let Some(url) = &options.files_url {
        command.args(["--files-url", url]);
    }
    for (flag, others) in [
        ("--add-image", &options.others),
        ("--add-plugin", &options.plugins),
    ] {
        for other in others {
            command.arg(flag).arg(std::path::absolute(other)?);
        }
    }
    command.current_dir(&source);
    command.env("CARGO_TARGET_DIR", again.join("target"));
    progress::say("building the release again, in another folder");
    shell::inherit(&mut command)?;
    let (first, second): (Vec<Sum>, Vec<Sum>) = (listing::sums(output)?, listing::sums(&files)?);
    let differences = listing::differences(&first, &second);
    if !differences.is_empty() {
        bail!(
            "two builds of one commit differ in {}: compare {} with {}",
            differences.join(", "),
            output.display(),
            files.display()
        );
    }
    progress::say("two builds of this commit have the same files");
    Ok(())
}

/// Prints the name and size of each file of the release.
fn report(output: &Path) -> Result<()> {
    progress::say(&format!("the release is in {}", output.display()));
    for Sum { name, .. } in listing::sums(output)? {
        let size = fs::metadata(output.join(&name))?.len();
        println!("{:>10}  {name}", image::megabytes(size));
    }
    Ok(())
}
