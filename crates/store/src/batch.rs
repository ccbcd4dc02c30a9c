//! INSERT statements for several rows at once.

/// An INSERT prepared for 1, 2, 4 … 64 rows: any number of rows takes a few of these statements,
/// and all stay prepared.
pub(crate) struct Batch(Vec<(usize, String)>);

impl Batch {
    /// `INSERT INTO {table} VALUES ($1, …), … {after}`; `table` includes the column names.
    pub(crate) fn new(table: &str, columns: usize, after: &str) -> Self {
        let length = |rows: usize| {
            (rows, format!("INSERT INTO {table} VALUES {} {after}", values(rows, columns)))
        };
        Self([64, 32, 16, 8, 4, 2, 1].map(length).to_vec())
    }

    /// Splits the rows into chunks, each with its statement.
    pub(crate) fn chunks<'a, T>(
        &'a self,
        rows: &'a [T],
    ) -> impl Iterator<Item = (&'a str, &'a [T])> {
        let mut rest = rows;
        std::iter::from_fn(move || {
            let (length, sql) = self.0.iter().find(|(length, _)| *length <= rest.len())?;
            let (chunk, after) = rest.split_at(*length);
            rest = after;
            Some((sql.as_str(), chunk))
        })
    }
}

/// `($1, $2), ($3, $4)` for two rows of two columns.
fn values(rows: usize, columns: usize) -> String {
    let row = |row: usize| format!("({})", placeholders(row * columns + 1, columns));
    (0..rows).map(row).collect::<Vec<_>>().join(", ")
}

/// `$3, $4` for two placeholders starting at 3.
pub(crate) fn placeholders(first: usize, count: usize) -> String {
    (first..first + count).map(|number| format!("${number}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_has_one_placeholder_per_value() {
        assert_eq!(values(1, 5), "($1, $2, $3, $4, $5)");
        assert!(values(64, 5).ends_with("($316, $317, $318, $319, $320)"));
    }

    #[test]
    fn chunks_cover_all_rows_in_order() {
        let batch = Batch::new("t (n)", 1, "");
        for count in 0..200 {
            let rows: Vec<usize> = (0..count).collect();
            let chunks: Vec<_> = batch.chunks(&rows).collect();
            assert_eq!(
                chunks.iter().flat_map(|(_, chunk)| chunk.to_vec()).collect::<Vec<_>>(),
                rows
            );
            for (sql, chunk) in chunks {
                assert_eq!(sql.matches('$').count(), chunk.len());
            }
        }
    }
}
