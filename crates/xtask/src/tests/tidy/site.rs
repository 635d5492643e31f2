//! Checks that the site contains every page and shows the example files unchanged. `cargo xtask site` checks the links
//! of the built site.

use std::fs;
use std::path::Path;

use super::blocks::blocks;
use super::{files, root};

fn relative(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}

#[test]
fn site_contains_every_page_of_docs() {
    let work = tempfile::tempdir().unwrap();
    let pages = crate::site::write(&root(), work.path()).unwrap();
    let mut docs = Vec::new();
    files(&root().join("docs"), ".md", &mut docs);
    let mut missing: Vec<String> = docs.iter().map(|path| relative(path)).collect();
    missing.retain(|page| page != "docs/SUMMARY.md" && !pages.contains(page));
    assert!(
        missing.is_empty(),
        "pages that are missing in docs/SUMMARY.md: {missing:#?}"
    );
    assert!(pages.contains(&"examples/clients/go/main.go".to_owned()));
}

#[test]
fn index_of_examples_lists_every_example() {
    let index = fs::read_to_string(root().join("examples/README.md")).unwrap();
    let mut examples = Vec::new();
    files(&root().join("examples"), ".yaml", &mut examples);
    assert!(examples.len() > 10);
    for example in examples {
        let name = example.file_name().unwrap().to_string_lossy().into_owned();
        assert!(
            index.contains(&format!("]({name})")),
            "{name} is not in examples/README.md"
        );
    }
}

#[test]
fn connecting_page_shows_example_programs() {
    let page = fs::read_to_string(root().join("docs/connecting.md")).unwrap();
    let shown = blocks(&page);
    for (language, file) in [
        ("go", "examples/clients/go/main.go"),
        ("python", "examples/clients/python/client.py"),
    ] {
        let program = fs::read_to_string(root().join(file)).unwrap();
        let same = shown
            .iter()
            .any(|it| it.language == language && it.text == program);
        assert!(same, "docs/connecting.md does not show {file}");
    }
}
