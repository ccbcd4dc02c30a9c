//! Tables of lists. On a terminal a table is as wide as the terminal: cells of columns whose
//! heading ends with `…` are truncated. Elsewhere cells are complete.

use std::io::{self, IsTerminal};

use comfy_table::{ColumnConstraint, ContentArrangement, Row, Table, presets::NOTHING};

use crate::{sanitize::sanitize_line, style::Palette};

/// The headings of columns whose words are styled. Only columns of ASCII text precede them.
const STYLED: [&str; 3] = ["STATE", "STATUS", "OUTCOME"];

/// The width for tables on standard output.
pub(crate) fn width() -> Option<u16> {
    let stdout = io::stdout();
    let size =
        stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout).ok()).flatten()?;
    (size.ws_col > 0).then_some(size.ws_col.max(40))
}

/// Formats rows under headings without styles.
pub(crate) fn plain<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    table(width(), Palette::default(), headings, rows)
}

/// Formats rows under headings.
pub(crate) fn table<const N: usize>(
    width: Option<u16>,
    style: Palette,
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    let row = |cells: Vec<String>| {
        let mut row = Row::from(cells);
        row.max_height(1);
        row
    };
    table.set_header(row(headings.map(|heading| heading.trim_end_matches('…').into()).to_vec()));
    for cells in rows {
        table.add_row(row(cells.map(|cell| sanitize_line(&cell)).to_vec()));
    }
    table.set_content_arrangement(match width {
        Some(_) => ContentArrangement::Dynamic,
        None => ContentArrangement::Disabled,
    });
    if let Some(width) = width {
        table.set_width(width);
    }
    for (column, heading) in table.column_iter_mut().zip(headings) {
        column.set_padding((0, 2));
        if !heading.ends_with('…') {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
    let text = table.trim_fmt();
    let at = STYLED.iter().find_map(|heading| text.lines().next()?.find(heading));
    let line = |(index, line): (usize, &str)| match at {
        Some(at) if index > 0 => style_word(style, line, at) + "\n",
        _ => format!("{line}\n"),
    };
    text.lines().enumerate().map(line).collect()
}

/// Styles the state or outcome at a byte offset.
fn style_word(style: Palette, line: &str, at: usize) -> String {
    let (Some(before), Some(rest)) = (line.get(..at), line.get(at..)) else {
        return line.to_owned();
    };
    let word = rest.split(' ').next().unwrap_or_default();
    format!("{before}{}{}", style.state(word), &rest[word.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(width: Option<u16>, rows: &[[&str; 3]]) -> String {
        let rows = rows.iter().map(|row| row.map(str::to_owned));
        table(width, Palette::default(), ["ID", "STATE", "TITLE…"], rows)
    }

    #[test]
    fn cells_are_single_line_and_line_up() {
        let rows = [["a", "idle", "one\ntwo"], ["bbb", "running", "\x1b[31mred"]];
        let lines = "ID   STATE    TITLE\na    idle     one two\nbbb  running  red\n";
        assert_eq!(shown(None, &rows), lines);
    }

    #[test]
    fn tables_fit_the_terminal() {
        let long = "a title that is far too long for a narrow terminal, with 漢字 in it";
        let rows = [["ses_4kq2aaaaaaaa", "needs_input", long], ["ses_b81xaaaaaaaa", "idle", "b"]];
        for width in [60, 80] {
            let text = shown(Some(width), &rows);
            assert_eq!(text.lines().count(), 3, "{text}");
            assert!(text.contains("ses_4kq2aaaaaaaa  needs_input  a title"), "{text}");
            assert!(text.lines().nth(1).unwrap().ends_with('…'), "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= width.into()), "{text}");
        }
        assert!(shown(None, &rows).contains(long), "programs get complete cells");
    }

    #[test]
    fn states_are_styled_and_ids_are_not() {
        let style = Palette::new(true, None);
        let line = style_word(style, "idle  failed #2  x", 6);
        assert_eq!(line, format!("idle  {} #2  x", style.fail("failed")));
    }
}
