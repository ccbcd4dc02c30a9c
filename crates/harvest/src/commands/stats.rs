//! `harvest stats`: prints what model calls used and cost, and what sandboxes used.

use std::time::SystemTime;

use anyhow::Result;
use harvest_proto::{Timestamp, api::Spending};

use crate::{Invocation, cli::StatsArgs, client::Client};

pub(crate) async fn run(ctx: &Invocation, args: &StatsArgs) -> Result<u8> {
    let since = Timestamp::from(SystemTime::now()).before(args.since.into());
    let path = format!("/v1/stats?by={}&since={since}", args.by);
    let sums: Vec<Spending> = Client::find(&ctx.config)?.all(&path).await?;
    if sums.is_empty() && !ctx.print.json {
        ctx.print.note("No sandbox ran in this time, and no model call cost anything");
        return Ok(0);
    }
    let by = args.by.as_str().to_uppercase();
    let headings =
        [&format!("{by}…"), "CALLS", "TOKENS IN", "TOKENS OUT", "COST", "CPU S", "MEMORY GIB S"];
    ctx.print.list(&sums, headings, row)?;
    let unpriced: u64 = sums.iter().map(|sum| sum.unpriced_calls).sum();
    if unpriced > 0 {
        ctx.print.hint(format!(
            "{unpriced} calls are of models without a known price; add them to the file that the \
             setting `prices` names"
        ));
    }
    Ok(0)
}

fn row(sum: &Spending) -> [String; 7] {
    let usage = sum.usage;
    let read = usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens;
    [
        if sum.name.is_empty() { "–".to_owned() } else { sum.name.clone() },
        sum.calls.to_string(),
        read.to_string(),
        usage.output_tokens.to_string(),
        sum.spent_micros.to_string(),
        tenths(sum.cpu_millis, 1000),
        tenths(sum.memory_mib_seconds, 1024),
    ]
}

/// A number of units with one decimal, rounded to nearest.
fn tenths(count: u64, unit: u64) -> String {
    let tenths = (count.saturating_mul(10).saturating_add(unit / 2)) / unit;
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::tenths;

    #[test]
    fn units_are_printed_with_one_decimal() {
        assert_eq!(
            [0, 49, 50, 1_949, 1_950].map(|millis| tenths(millis, 1000)),
            ["0.0", "0.0", "0.1", "1.9", "2.0"]
        );
    }
}
