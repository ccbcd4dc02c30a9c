//! Bounds the cycles between the modules of a crate. A module here is a file or folder directly
//! below `src`; an edge is a path through `crate::` or `super::` outside of tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::source::{crates, identifier, production, root, rust_files, visible_item};

/// Modules that a crate's largest cycle may hold.
const LARGEST_CYCLE: usize = 4;

type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn module_cycles_stay_small() {
    let mut over = Vec::new();
    for name in crates() {
        let largest = largest_cycle(&graph(&root().join(format!("crates/{name}/src"))));
        println!("{name}: {} of at most {LARGEST_CYCLE}: {largest:?}", largest.len());
        if largest.len() > LARGEST_CYCLE {
            over.push((name, largest));
        }
    }
    assert!(over.is_empty(), "cycles of more than {LARGEST_CYCLE} modules: {over:#?}");
}

fn graph(source: &Path) -> Graph {
    let texts: Vec<(Vec<String>, String)> = rust_files(source)
        .iter()
        .filter_map(|file| {
            let module = module_path(file.strip_prefix(source).unwrap())?;
            let text = fs::read_to_string(file).unwrap();
            let code: Vec<&str> = production(&text)
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .collect();
            Some((module, code.join("\n")))
        })
        .collect();
    let modules: BTreeSet<&str> =
        texts.iter().filter_map(|(module, _)| module.first()).map(String::as_str).collect();
    // Items that `crate::Item` reaches through a re-export in the root file.
    let mut homes: BTreeMap<&str, &str> = BTreeMap::new();
    for (module, text) in texts.iter().filter(|(module, _)| !module.is_empty()) {
        for item in text.lines().filter_map(declared) {
            homes.entry(item).or_insert(&module[0]);
        }
    }
    let mut graph = Graph::new();
    for (module, text) in texts.iter().filter(|(module, _)| !module.is_empty()) {
        for target in references(module, text) {
            let target = match modules.get(target.as_str()) {
                Some(target) => *target,
                None => match homes.get(target.as_str()) {
                    Some(home) => *home,
                    None => continue,
                },
            };
            if target != module[0] {
                graph.entry(module[0].clone()).or_default().insert(target.to_owned());
            }
        }
    }
    graph
}

/// The module a file is, outermost first; empty for the root file, `None` for tests and programs.
fn module_path(file: &Path) -> Option<Vec<String>> {
    let mut parts: Vec<String> = file
        .with_extension("")
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if parts.iter().any(|part| part.contains("test") || part == "bin") {
        return None;
    }
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    Some(parts)
}

/// The name of the visible item that a line declares.
fn declared(line: &str) -> Option<&str> {
    const KINDS: [&str; 7] = ["struct ", "enum ", "trait ", "type ", "fn ", "const ", "static "];
    let mut item = visible_item(line)?;
    for modifier in ["const fn ", "async fn ", "unsafe fn "] {
        if let Some(rest) = item.strip_prefix(modifier) {
            return Some(identifier(rest));
        }
    }
    let kind = KINDS.iter().find(|kind| item.starts_with(**kind))?;
    item = &item[kind.len()..];
    Some(identifier(item))
}

/// The first name after `crate::` (or after as many `super::` as lead to the crate's root) of every
/// path in a file, groups in braces included.
fn references(module: &[String], text: &str) -> Vec<String> {
    let to_root = "super::".repeat(module.len());
    let mut found = Vec::new();
    for prefix in ["crate::", to_root.as_str()] {
        for (position, _) in text.match_indices(prefix) {
            // One `super::` too many would belong to a longer path.
            if prefix == to_root && text[..position].ends_with("super::") {
                continue;
            }
            let rest = &text[position + prefix.len()..];
            match rest.strip_prefix('{') {
                Some(group) => found.extend(group_heads(group)),
                None => found.push(identifier(rest).to_owned()),
            }
        }
    }
    found
}

/// The first name of each path in the braces of a `use`.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut heads, mut fresh) = (0, Vec::new(), true);
    for (position, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => fresh = true,
            _ if fresh && depth == 0 && !character.is_whitespace() => {
                heads.push(identifier(&group[position..]).to_owned());
                fresh = false;
            }
            _ => {}
        }
    }
    heads
}

/// The largest set of modules that all reach each other.
fn largest_cycle(graph: &Graph) -> BTreeSet<String> {
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|from| (from, reachable(graph, from))).collect();
    let cycles = reached.iter().map(|(from, targets)| {
        let mutual = |to: &&&String| reached.get(**to).is_some_and(|back| back.contains(from));
        targets.iter().filter(mutual).map(|to| (*to).clone()).collect::<BTreeSet<String>>()
    });
    cycles.max_by_key(BTreeSet::len).unwrap_or_default()
}

fn reachable<'graph>(graph: &'graph Graph, from: &String) -> BTreeSet<&'graph String> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&String> = graph.get(from).into_iter().flatten().collect();
    while let Some(next) = open.pop() {
        if found.insert(next) {
            open.extend(graph.get(next).into_iter().flatten());
        }
    }
    found
}
