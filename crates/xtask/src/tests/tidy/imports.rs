//! Checks that the modules of a crate do not import each other in a cycle, because such modules cannot be tested or
//! moved separately.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, ItemMod, ItemUse, UseTree};

use super::{files, root};

/// The path of a module in its crate, as a list of names.
type Module = Vec<String>;
/// For each module, the modules of the same crate that it imports.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

/// Modules in cycles that existed when this check was written. Do not add modules.
const KNOWN: [&str; 8] = [
    "xtask::image",
    "xtask::testbed",
    "xtask::testbed::control",
    "xtask::testbed::control::stores",
    "xtask::testbed::environment",
    "xtask::testbed::inside",
    "xtask::testbed::node",
    "xtask::testbed::state",
];

/// Collects the modules of the same crate that a module uses. Tests are skipped.
struct Paths<'a> {
    module: Module,
    modules: &'a BTreeSet<Module>,
    named: BTreeSet<Module>,
}

impl Paths<'_> {
    /// Adds the module of the item with this path: the longest prefix of the path that names a module. Paths that do
    /// not start with `crate`, `self` or `super` are skipped.
    fn add(&mut self, path: &[String]) {
        let mut at = self.module.clone();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => at.clear(),
            Some("super") => drop(at.pop()),
            Some("self") => {}
            _ => return,
        }
        rest = &rest[1..];
        while rest.first().is_some_and(|segment| segment == "super") {
            at.pop();
            rest = &rest[1..];
        }
        at.extend(rest.iter().cloned());
        while !at.is_empty() && !self.modules.contains(&at) {
            at.pop();
        }
        if !at.is_empty() && at != self.module {
            self.named.insert(at);
        }
    }

    fn add_tree(&mut self, tree: &UseTree, before: &[String]) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&path.tree, &with(&path.ident)),
            UseTree::Name(name) => self.add(&with(&name.ident)),
            UseTree::Rename(name) => self.add(&with(&name.ident)),
            UseTree::Glob(_) => self.add(before),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_tree(tree, before);
                }
            }
        }
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    let words = |attribute: &Attribute| attribute.parse_args::<syn::Ident>();
    let mut all = attributes.iter();
    all.any(|one| one.path().is_ident("cfg") && words(one).is_ok_and(|word| word == "test"))
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    /// The path in `pub(super)` is not an import.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if !is_test(&item.attrs) {
            self.add_tree(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter();
        let segments: Vec<String> = segments.map(|one| one.ident.to_string()).collect();
        self.add(&segments);
        visit::visit_path(self, path);
    }
}

/// The path of the module in this file. `None` for the root module of a crate and for tests.
fn module(source: &Path, folder: &Path) -> Option<Module> {
    let path = source.strip_prefix(folder).ok()?.with_extension("");
    let segments = path.iter().map(|one| one.to_string_lossy().into_owned());
    let mut segments: Module = segments.collect();
    if segments.iter().any(|one| one == "tests") {
        return None;
    }
    segments.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
    (!segments.is_empty()).then_some(segments)
}

fn imports(folder: &Path) -> Imports {
    let mut found = Vec::new();
    files(folder, ".rs", &mut found);
    let sources: BTreeMap<Module, _> = found
        .into_iter()
        .filter_map(|source| Some((module(&source, folder)?, source)))
        .collect();
    let modules = sources.keys().cloned().collect();
    let read = |(module, source): (&Module, &std::path::PathBuf)| {
        let text = fs::read_to_string(source).unwrap();
        let mut paths = Paths {
            module: module.clone(),
            modules: &modules,
            named: BTreeSet::new(),
        };
        paths.visit_file(&syn::parse_file(&text).unwrap());
        (module.clone(), paths.named)
    };
    sources.iter().map(read).collect()
}

/// All modules that `from` imports, directly or through other modules.
fn reached(from: &Module, imports: &Imports) -> BTreeSet<Module> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        for import in imports.get(module).into_iter().flatten() {
            if reached.insert(import.clone()) {
                next.push(import);
            }
        }
    }
    reached
}

/// The modules in a cycle, each with the imports that lead back to it.
fn cycles(imports: &Imports) -> BTreeMap<String, Vec<String>> {
    let all: BTreeMap<&Module, BTreeSet<Module>> = imports
        .keys()
        .map(|module| (module, reached(module, imports)))
        .collect();
    let leads_back = |module: &Module, import: &&Module| all[import].contains(module);
    let circular = imports
        .iter()
        .filter(|(module, _)| all[module].contains(*module));
    circular
        .map(|(module, named)| {
            let back = named.iter().filter(|import| leads_back(module, import));
            (module.join("::"), back.map(|one| one.join("::")).collect())
        })
        .collect()
}

#[test]
fn modules_have_only_known_import_cycles() {
    let mut found = BTreeSet::new();
    let mut report = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        for (module, back) in cycles(&imports(&folder.join("src"))) {
            report.push(format!("{name}::{module} imports {}", back.join(", ")));
            found.insert(format!("{name}::{module}"));
        }
    }
    let known: BTreeSet<String> = KNOWN.map(str::to_owned).into();
    assert_eq!(
        found,
        known,
        "move the code that both sides need into a module that imports neither, or shorten the list of known cycles:\n{}",
        report.join("\n")
    );
}

#[test]
fn import_cycle_of_three_modules_is_detected() {
    let module = |name: &str| vec![name.to_owned()];
    let imports: Imports = [("a", ["b"]), ("b", ["c"]), ("c", ["a"]), ("d", ["a"])]
        .map(|(from, to)| (module(from), to.map(module).into()))
        .into();
    let found = cycles(&imports);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(found["a"], ["b"]);
}
