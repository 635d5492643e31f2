//! Finds links in Markdown, resolves them to repository paths, and translates them to paths of the site. It reads no
//! files.

use std::fmt::Write as _;

use anyhow::{Context, Result};

/// Folder of the pages in the repository. The pages are at the top level of the site.
const DOCS: &str = "docs/";
/// Folder of the site for files from all other folders of the repository.
const OTHERS: &str = "repository/";

/// The replacement for a link.
pub(super) struct Change {
    pub(super) target: String,
    /// The new text of the link, if the current text is the file name of a page, such as `tls.md`.
    pub(super) title: String,
}

/// The path without `.` and `..`. `None` for a path outside of the repository.
pub(super) fn normalized(path: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in path.split('/').filter(|part| !matches!(*part, "" | ".")) {
        if part == ".." {
            parts.pop()?;
        } else {
            parts.push(part);
        }
    }
    Some(parts.join("/"))
}

/// The folder of a file, with a slash at the end. Empty for a file at the top level.
pub(super) fn folder(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// The path of a repository file in the sources of the site. For a file that is neither a Markdown page nor a picture,
/// the path of a generated page that shows the file.
pub(super) fn in_site(path: &str) -> String {
    let place = match path.strip_prefix(DOCS) {
        Some(page) => page.to_owned(),
        None => format!("{OTHERS}{path}"),
    };
    if is_page(path) || is_picture(path) {
        place
    } else {
        format!("{place}.md")
    }
}

pub(super) fn is_page(path: &str) -> bool {
    ends_with(path, "md")
}

/// True for an SVG picture. Files that are neither SVG nor Markdown get a generated page (see [`in_site`]).
pub(super) fn is_picture(path: &str) -> bool {
    ends_with(path, "svg")
}

fn ends_with(path: &str, extension: &str) -> bool {
    path.rsplit_once('.')
        .is_some_and(|(_, end)| end == extension)
}

/// The path of the HTML file that mdBook writes for a page. A `README.md` becomes the index of its folder.
fn html(page: &str) -> String {
    let (folder, name) = page.split_at(folder(page).len());
    let stem = name.trim_end_matches(".md");
    let stem = if stem == "README" { "index" } else { stem };
    format!("{folder}{stem}.html")
}

/// The relative link from a page to a file. `page` and `file` are repository paths.
pub(super) fn link(page: &str, file: &str) -> String {
    let up = "../".repeat(in_site(page).matches('/').count());
    let place = in_site(file);
    if is_picture(file) {
        return format!("{up}{place}");
    }
    format!("{up}{}", html(&place))
}

/// The targets of the links in a table of contents, as repository paths.
pub(super) fn listed(contents: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    changed(contents, |target| {
        let path = normalized(&format!("{DOCS}{target}"));
        found.push(path.with_context(|| format!("{target} is outside of the repository"))?);
        Ok(Change {
            target: target.to_owned(),
            title: String::new(),
        })
    })?;
    Ok(found)
}

/// The text with the replacement from `change` for each link to another file. Links in code blocks are unchanged.
pub(super) fn changed(
    text: &str,
    mut change: impl FnMut(&str) -> Result<Change>,
) -> Result<String> {
    let mut result = String::with_capacity(text.len());
    let mut in_code = false;
    for line in text.split_inclusive('\n') {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        if is_fence || in_code {
            result.push_str(line);
            continue;
        }
        let mut parts = line.split("](");
        result.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let (target, rest) = part.split_once(')').unwrap_or((part, ""));
            let (file, anchor) = match target.find('#') {
                Some(at) => target.split_at(at),
                None => (target, ""),
            };
            if file.is_empty() || file.contains("://") {
                let _ = write!(result, "]({target}){rest}");
                continue;
            }
            let change = change(file)?;
            let start = result.rfind('[').map_or(0, |at| at + 1);
            if is_page(&result[start..]) {
                result.replace_range(start.., &change.title);
            }
            let _ = write!(result, "]({}{anchor}){rest}", change.target);
        }
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_changed_to_paths_of_site() {
        let cases = [
            ("docs/tls.md", "docs/auth.md", "auth.html"),
            ("docs/README.md", "docs/adr/README.md", "adr/index.html"),
            ("docs/adr/0001-a.md", "docs/tls.md", "../tls.html"),
            ("docs/tls.md", "SECURITY.md", "repository/SECURITY.html"),
            ("SECURITY.md", "docs/security.md", "../security.html"),
            (
                "docs/internals/tls.md",
                "examples/a.yaml",
                "../repository/examples/a.yaml.html",
            ),
            ("docs/tls.md", "docs/pictures/a.svg", "pictures/a.svg"),
        ];
        for (page, file, expected) in cases {
            assert_eq!(link(page, file), expected, "{page} {file}");
        }
    }

    #[test]
    fn only_links_to_files_are_changed() {
        let change = |file: &str| {
            Ok(Change {
                target: format!("x/{file}"),
                title: "T".to_owned(),
            })
        };
        for (text, expected) in [
            ("[a](b.md#c) [d](#e)", "[a](x/b.md#c) [d](#e)"),
            ("[f](https://g.h/i.md)", "[f](https://g.h/i.md)"),
            (
                "```sh\n[j](k.md)\n```\n[l](m)",
                "```sh\n[j](k.md)\n```\n[l](x/m)",
            ),
            ("see [b.md](b.md) [c](c.md)", "see [T](x/b.md) [c](x/c.md)"),
        ] {
            assert_eq!(changed(text, change).unwrap(), expected);
        }
    }

    #[test]
    fn paths_outside_of_repository_are_rejected() {
        assert_eq!(normalized("docs/../README.md").unwrap(), "README.md");
        assert_eq!(normalized("docs/./adr/../a.md").unwrap(), "docs/a.md");
        assert_eq!(normalized("docs/../../a.md"), None);
        assert!(listed("- [a](../../b.md)").is_err());
    }
}
