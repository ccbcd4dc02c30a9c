//! Statements that write several rows at once.

/// One statement in seven lengths, so that every number of rows is written by a few and each stays prepared.
pub(crate) struct Batch(Vec<(usize, String)>);

impl Batch {
    /// `INSERT INTO {table} VALUES ($1, …), … {after}`; the table with its columns.
    pub(crate) fn new(table: &str, columns: usize, after: &str) -> Self {
        let length = |rows: usize| {
            (rows, format!("INSERT INTO {table} VALUES {} {after}", values(rows, columns)))
        };
        Self([64, 32, 16, 8, 4, 2, 1].map(length).to_vec())
    }

    /// The rows in pieces, each with the statement that writes it.
    pub(crate) fn pieces<'a, T>(
        &'a self,
        rows: &'a [T],
    ) -> impl Iterator<Item = (&'a str, &'a [T])> {
        let mut rest = rows;
        std::iter::from_fn(move || {
            let (length, sql) = self.0.iter().find(|(length, _)| *length <= rest.len())?;
            let (piece, after) = rest.split_at(*length);
            rest = after;
            Some((sql.as_str(), piece))
        })
    }
}

/// `($1, $2), ($3, $4)` for two rows of two columns.
fn values(rows: usize, columns: usize) -> String {
    let row = |row: usize| format!("({})", places(row * columns + 1, columns));
    (0..rows).map(row).collect::<Vec<_>>().join(", ")
}

/// `$3, $4` for two from the third on.
pub(crate) fn places(first: usize, count: usize) -> String {
    (first..first + count).map(|place| format!("${place}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_of_several_rows_has_a_place_for_each_value() {
        assert_eq!(values(1, 5), "($1, $2, $3, $4, $5)");
        assert!(values(64, 5).ends_with("($316, $317, $318, $319, $320)"));
    }

    #[test]
    fn every_row_is_in_one_piece_and_in_order() {
        let batch = Batch::new("t (n)", 1, "");
        for count in 0..200 {
            let rows: Vec<usize> = (0..count).collect();
            let pieces: Vec<_> = batch.pieces(&rows).collect();
            assert_eq!(
                pieces.iter().flat_map(|(_, piece)| piece.to_vec()).collect::<Vec<_>>(),
                rows
            );
            for (sql, piece) in pieces {
                assert_eq!(sql.matches('$').count(), piece.len());
            }
        }
    }
}
