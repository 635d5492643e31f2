//! Writes the sources of the site. mdBook accepts only pages below one folder. The pages and the files to which they
//! link are therefore copied, and the links are changed to the names of the copies. This way, links in docs work on a
//! code host and in the site.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::links::{
    Change, changed, folder, in_site, is_page, is_picture, link, listed, normalized,
};

/// The table of contents. A linked file that is not listed in it appears below the README of its folder.
const CONTENTS: &str = "docs/SUMMARY.md";
/// The introduction. It is a README, but no other page appears below it.
const INTRODUCTION: &str = "docs/README.md";
/// Settings, styles and scripts. They are copied unchanged.
const SETTINGS: [(&str, &str); 3] = [
    ("docs/book.toml", "book.toml"),
    ("docs/site.css", "site.css"),
    ("docs/site.js", "site.js"),
];

/// Writes the settings and pages of the repository `root` into `work`. Returns the repository paths of all pages.
/// Unchanged files are not written.
pub(crate) fn write(root: &Path, work: &Path) -> Result<Vec<String>> {
    for (from, to) in SETTINGS {
        put(&work.join(to), &read(root, from)?)?;
    }
    let source = work.join("src");
    let contents = read(root, CONTENTS)?;
    let listed = listed(&contents)?;
    // `all` begins with the pages in the table of contents. The loop adds every file to which a page in `all` links.
    let mut all = listed.clone();
    let mut index = 0;
    while let Some(page) = all.get(index).cloned() {
        index += 1;
        let text = read(root, &page)?;
        if is_picture(&page) {
            put(&source.join(in_site(&page)), &text)?;
            continue;
        }
        if !is_page(&page) {
            put(&source.join(in_site(&page)), &shown(&page, &text))?;
            let raw = in_site(&page);
            put(&source.join(raw.trim_end_matches(".md")), &text)?;
            continue;
        }
        let text = changed(&text, |target| {
            let file = resolved(root, &page, target)?;
            if !all.contains(&file) {
                all.push(file.clone());
            }
            Ok(Change {
                target: link(&page, &file),
                title: title(root, &file)?,
            })
        })?;
        put(&source.join(in_site(&page)), &text)?;
    }
    all.retain(|file| !is_picture(file));
    let mut below: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut unlisted = all[listed.len()..].to_vec();
    unlisted.sort();
    for file in unlisted {
        let parent = parent(&file, &listed)?;
        let entry = format!("  - [{}]({})\n", title(root, &file)?, in_site(&file));
        below.entry(parent).or_default().push(entry);
    }
    put(&source.join("SUMMARY.md"), &summary(&contents, &below)?)?;
    Ok(all)
}

/// The path of the file to which a link leads. For a folder, the path of its README.
fn resolved(root: &Path, page: &str, target: &str) -> Result<String> {
    let path = normalized(&format!("{}{target}", folder(page)));
    let path = path.with_context(|| format!("{page}: {target} is outside of the repository"))?;
    if root.join(&path).is_dir() {
        Ok(format!("{path}/README.md"))
    } else {
        Ok(path)
    }
}

/// The README to which `file` belongs: of all README files in `listed`, the nearest in the folders above `file`.
fn parent(file: &str, listed: &[String]) -> Result<String> {
    let mut place = folder(file);
    loop {
        let readme = format!("{place}README.md");
        if readme == INTRODUCTION || place.is_empty() {
            bail!("a page links to {file}, which {CONTENTS} does not list: add {file}");
        }
        if listed.contains(&readme) {
            return Ok(readme);
        }
        place = folder(place.trim_end_matches('/'));
    }
}

/// The title of a file in the table of contents: its first heading, or its name if it has no heading.
fn title(root: &Path, file: &str) -> Result<String> {
    let name = &file[folder(file).len()..];
    if !is_page(file) {
        return Ok(name.to_owned());
    }
    let text = read(root, file)?;
    let heading = text.lines().find_map(|line| line.strip_prefix("# "));
    Ok(heading.unwrap_or(name).replace('`', ""))
}

/// The table of contents of the site. `below` contains the additional entries below each listed page.
fn summary(contents: &str, below: &BTreeMap<String, Vec<String>>) -> Result<String> {
    let mut text = String::new();
    for line in contents.split_inclusive('\n') {
        let mut entries = None;
        let line = changed(line, |target| {
            let path = normalized(&format!("{}{target}", folder(CONTENTS)));
            let path = path.context("a path outside of the repository")?;
            entries = below.get(&path);
            Ok(Change {
                target: in_site(&path),
                title: path.clone(),
            })
        })?;
        text.push_str(&line);
        text.extend(entries.into_iter().flatten().map(String::as_str));
    }
    Ok(text)
}

/// A page that shows a file as a code block.
fn shown(file: &str, text: &str) -> String {
    let name = &file[folder(file).len()..];
    let language = match name.rsplit_once('.') {
        Some((_, "py")) => "python",
        Some((_, end)) => end,
        None => "text",
    };
    let mut page = String::new();
    let _ = write!(
        page,
        "# {name}\n\nThis is the file `{file}` of the repository. [Download the file]({name})\n\n\
         ```{language}\n{}\n```\n",
        text.trim_end()
    );
    page
}

fn read(root: &Path, file: &str) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))
}

fn put(file: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(file).is_ok_and(|found| found == text) {
        return Ok(());
    }
    let context = || file.display().to_string();
    fs::create_dir_all(file.parent().unwrap_or(file)).with_context(context)?;
    fs::write(file, text).with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a repository with these files and writes the sources of its site.
    fn written(files: &[(&str, &str)]) -> (tempfile::TempDir, Result<Vec<String>>) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let settings = SETTINGS.map(|(file, _)| (file, ""));
        for (file, text) in settings.iter().chain(files) {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), text).unwrap();
        }
        let outcome = write(&root, &folder.path().join("work"));
        (folder, outcome)
    }

    #[test]
    fn pages_and_linked_files_are_copied_and_links_changed() {
        let (folder, outcome) = written(&[
            (
                "docs/SUMMARY.md",
                "- [A](a.md)\n- [B](../b/README.md)\n- [C](a.md)\n",
            ),
            (
                "docs/a.md",
                "[b](../b) [c](../b/c/c.yaml) [d](https://d.e)\n",
            ),
            (
                "b/README.md",
                "[a](../docs/a.md#x) [b/page.md](page.md) ![d](../docs/d.svg)\n",
            ),
            ("docs/d.svg", "<svg/>\n"),
            ("b/page.md", "# A `page`\n"),
            ("b/c/c.yaml", "c: 1\n"),
        ]);
        assert_eq!(outcome.unwrap().len(), 5);
        let read = |file: &str| read(&folder.path().join("work/src"), file).unwrap();
        assert_eq!(
            read("a.md"),
            "[b](repository/b/index.html) [c](repository/b/c/c.yaml.html) [d](https://d.e)\n"
        );
        assert_eq!(
            read("repository/b/README.md"),
            "[a](../../a.html#x) [A page](../../repository/b/page.html) ![d](../../d.svg)\n"
        );
        assert!(read("repository/b/c/c.yaml.md").contains("```yaml\nc: 1\n```"));
        assert_eq!(read("repository/b/c/c.yaml"), "c: 1\n");
        assert_eq!(read("d.svg"), "<svg/>\n");
        assert_eq!(
            read("SUMMARY.md"),
            "- [A](a.md)\n- [B](repository/b/README.md)\n  - [c.yaml](repository/b/c/c.yaml.md)\n  \
             - [A page](repository/b/page.md)\n- [C](a.md)\n"
        );
    }

    #[test]
    fn unlisted_linked_page_in_docs_or_repository_root_is_rejected() {
        for place in ["docs/b.md", "b.md"] {
            let (_folder, outcome) = written(&[
                ("docs/SUMMARY.md", "[I](README.md)\n\n- [A](a.md)\n"),
                ("docs/README.md", "I\n"),
                ("docs/a.md", &format!("[b](../{place})\n")),
                (place, "b\n"),
            ]);
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(place), "{error}");
        }
    }
}
