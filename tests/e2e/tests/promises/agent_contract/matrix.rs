//! The table of agents in the documents, which the tests compare or write.

use std::{
    fs::File,
    io::{Read as _, Seek as _, Write as _},
    path::Path,
};

const REGENERATE: &str = "HARVEST_REGENERATE=1 cargo nextest run -p harvest-e2e agent_contract";

/// A row and what it says about one agent.
pub(super) type Row = (&'static str, &'static str);

/// Compares the agent's column with the page; with `HARVEST_REGENERATE` set, writes it first.
pub(super) fn check(agent: &str, rows: &[Row]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/agents.md");
    let mut file = File::options().read(true).write(true).open(path).unwrap();
    // The tests of other agents write their columns at the same time.
    file.lock().unwrap();
    let mut page = String::new();
    file.read_to_string(&mut page).unwrap();
    let wanted = with_column(&page, agent, rows);
    if std::env::var_os("HARVEST_REGENERATE").is_some() {
        file.set_len(0).unwrap();
        file.rewind().unwrap();
        file.write_all(wanted.as_bytes()).unwrap();
    } else {
        assert_eq!(
            page, wanted,
            "docs/agents.md is out of date; regenerate it with\n  {REGENERATE}"
        );
    }
}

/// The page with these rows in its table; what they say about other agents stays.
fn with_column(page: &str, agent: &str, rows: &[Row]) -> String {
    let (table, rest): (Vec<&str>, Vec<&str>) =
        page.lines().partition(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let head = cells(table.first().expect("the page has a table"));
    let column = head.iter().position(|name| name.trim_matches('`') == agent).expect("a column");
    let mut new = format!("{}\n{}\n", table[0], table[1]);
    for (title, cell) in rows {
        let old = table.iter().map(|line| cells(line)).find(|cells| cells[0] == *title);
        let mut row = old.unwrap_or_else(|| vec![String::new(); head.len()]);
        (*title).clone_into(&mut row[0]);
        (*cell).clone_into(&mut row[column]);
        new += &format!("| {} |\n", row.join(" | "));
    }
    let at = page.lines().take_while(|line| !line.starts_with('|')).count();
    let text = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    text(&rest[..at]) + &new + &text(&rest[at..])
}

#[test]
fn column_of_an_agent_is_replaced() {
    let page = "# T\n\n| | `a` | `b` |\n|---|---|---|\n| x | 1 | 2 |\n| gone | 1 | 2 |\n\nEnd.\n";
    let new = with_column(page, "b", &[("x", "3"), ("y", "4")]);
    assert_eq!(new, "# T\n\n| | `a` | `b` |\n|---|---|---|\n| x | 1 | 3 |\n| y |  | 4 |\n\nEnd.\n");
}
