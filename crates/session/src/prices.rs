//! What model calls cost at list prices. Pure; the binary reads the price file.

use std::borrow::Cow;

use harvest_gateway::ledger::{MostTokens, PlannedCall, Used};
use harvest_proto::{Money, UpstreamName, event::Usage};

const TOKENS_PER_PRICE: u128 = 1_000_000;

/// The price of a model, in money per million tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// The upstream it is for; all that ask for a key when absent.
    pub upstream: Option<UpstreamName>,
    /// A model, or with `*` at the end all whose names begin so.
    pub model: String,
    pub input: Money,
    pub output: Money,
    pub cache_read: Money,
    pub cache_write: Money,
    /// The most tokens of input that the model reads.
    pub context: u64,
    /// The most tokens that it writes in a response.
    pub max_output: u64,
}

/// All prices; the first that matches a call is its price.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prices(pub Vec<Price>);

/// What is known of the cost of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pricing<'a> {
    Known(Cow<'a, Price>),
    /// The upstream asks for no key.
    Free,
    Unknown,
}

impl Prices {
    /// The price of the call's model, or the highest if other models may answer.
    pub(crate) fn of(&self, call: &PlannedCall) -> Pricing<'_> {
        let own = self.of_model(call, &call.model);
        let others = call.fallbacks.iter().map(|model| self.of_model(call, model));
        others.fold(own, Pricing::or_higher)
    }

    fn of_model(&self, call: &PlannedCall, model: &str) -> Pricing<'_> {
        match self.0.iter().find(|price| price.matches(call, model)) {
            Some(price) => Pricing::Known(Cow::Borrowed(price)),
            None if !call.keyed => Pricing::Free,
            None => Pricing::Unknown,
        }
    }
}

impl Price {
    fn matches(&self, call: &PlannedCall, model: &str) -> bool {
        let for_upstream = match &self.upstream {
            Some(name) => *name == call.upstream,
            None => call.keyed,
        };
        let for_model = match self.model.strip_suffix('*') {
            Some(prefix) => model.starts_with(prefix),
            None => model == self.model,
        };
        for_upstream && for_model
    }

    /// The higher of both in every part.
    fn or_higher(self, other: &Self) -> Self {
        Self {
            input: self.input.max(other.input),
            output: self.output.max(other.output),
            cache_read: self.cache_read.max(other.cache_read),
            cache_write: self.cache_write.max(other.cache_write),
            context: self.context.max(other.context),
            max_output: self.max_output.max(other.max_output),
            ..self
        }
    }

    fn cost(&self, usage: Usage) -> Money {
        let counts = [
            (usage.input_tokens, self.input),
            (usage.output_tokens, self.output),
            (usage.cache_read_tokens, self.cache_read),
            (usage.cache_write_tokens, self.cache_write),
        ];
        let cost = |(count, price): &(u64, Money)| u128::from(*count) * u128::from(price.micros());
        let all: u128 = counts.iter().map(cost).sum();
        Money::from_micros(u64::try_from(all.div_ceil(TOKENS_PER_PRICE)).unwrap_or(u64::MAX))
    }

    /// The most tokens of a call. Input may have to be written to the cache, if that costs more.
    fn most(&self, most: MostTokens) -> Usage {
        let input = most.input.unwrap_or(self.context).min(self.context);
        let output = most.output.unwrap_or(self.max_output).min(self.max_output);
        let output_tokens = output.saturating_mul(most.responses);
        match self.cache_write > self.input {
            true => Usage { cache_write_tokens: input, output_tokens, ..Usage::default() },
            false => Usage { input_tokens: input, output_tokens, ..Usage::default() },
        }
    }
}

impl Pricing<'_> {
    fn or_higher(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Free, other) => other,
            (own, Self::Free) => own,
            (Self::Known(own), Self::Known(other)) => {
                Self::Known(Cow::Owned(own.into_owned().or_higher(&other)))
            }
        }
    }

    /// The tokens to charge for a call that was held with the most it may use. Of a response that
    /// was not read to its end, the service may have computed all that was held.
    pub(crate) fn charged(&self, used: Used, most: MostTokens) -> Usage {
        match (self, used) {
            (_, Used::Counted(usage)) => usage,
            (Self::Known(price), Used::AtLeast(seen)) => {
                let held = price.most(most);
                if price.cost(held) < price.cost(seen) { seen } else { held }
            }
            (Self::Free | Self::Unknown, Used::AtLeast(seen)) => seen,
        }
    }

    /// What this usage costs; `None` without a known price.
    pub(crate) fn cost(&self, usage: Usage) -> Option<Money> {
        match self {
            Self::Known(price) => Some(price.cost(usage)),
            Self::Free => Some(Money::ZERO),
            Self::Unknown => None,
        }
    }

    /// The most that a call may use.
    pub(crate) fn most(&self, most: MostTokens) -> Usage {
        match self {
            Self::Known(price) => price.most(most),
            Self::Free | Self::Unknown => Usage::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::CallId;
    use proptest::prelude::*;

    use super::*;

    fn price(upstream: Option<&str>, model: &str, input: u64) -> Price {
        Price {
            upstream: upstream.map(|name| name.parse().unwrap()),
            model: model.to_owned(),
            input: Money::from_micros(input),
            output: Money::from_micros(5 * input),
            cache_read: Money::from_micros(input / 10),
            cache_write: Money::from_micros(input + input / 4),
            context: 1000,
            max_output: 100,
        }
    }

    fn call(upstream: &str, keyed: bool, model: &str) -> PlannedCall {
        PlannedCall {
            id: CallId::random(),
            upstream: upstream.parse().unwrap(),
            keyed,
            model: model.to_owned(),
            fallbacks: Vec::new(),
            most: MostTokens { input: Some(10), output: None, responses: 1 },
        }
    }

    #[test]
    fn first_matching_price_counts() {
        let prices = Prices(vec![
            price(Some("local"), "*", 1),
            price(None, "opus-4-1*", 2),
            price(None, "opus*", 3),
            price(None, "mini", 4),
        ]);
        let input = |upstream, keyed, model| match prices.of(&call(upstream, keyed, model)) {
            Pricing::Known(price) => Some(price.input.micros()),
            Pricing::Free => Some(0),
            Pricing::Unknown => None,
        };
        assert_eq!(input("local", false, "llama"), Some(1));
        assert_eq!(input("anthropic", true, "opus-4-1-20250805"), Some(2));
        assert_eq!(input("anthropic", true, "opus-5"), Some(3));
        assert_eq!(input("work", true, "mini"), Some(4));
        assert_eq!(input("work", true, "mini-2"), None);
        assert_eq!(input("other", false, "opus-5"), Some(0), "a service without a key is free");
        assert_eq!(input("anthropic", true, ""), None);
    }

    #[test]
    fn fallback_models_count_at_highest_price() {
        let mut prices = Prices(vec![price(None, "cheap", 1_000), price(None, "dear", 5_000)]);
        prices.0[0].context = 9_000;
        let input = |models: &[&str]| {
            let fallbacks = models.iter().map(|model| (*model).to_owned()).collect();
            match prices.of(&PlannedCall { fallbacks, ..call("work", true, "cheap") }) {
                Pricing::Known(price) => Some((price.input.micros(), price.context)),
                Pricing::Free => Some((0, 0)),
                Pricing::Unknown => None,
            }
        };
        assert_eq!(input(&[]), Some((1_000, 9_000)));
        assert_eq!(input(&["dear"]), Some((5_000, 9_000)));
        assert_eq!(input(&["dear", "cheap"]), Some((5_000, 9_000)));
        assert_eq!(input(&["cheap", "unknown"]), None);
        let local = call("local", false, "cheap");
        assert_eq!(prices.of(&PlannedCall { fallbacks: vec!["x".into()], ..local }), Pricing::Free);
    }

    #[test]
    fn cut_response_is_charged_as_held() {
        let prices = Prices(vec![price(None, "*", 1_000_000)]);
        let most = MostTokens { input: Some(10), output: Some(50), responses: 1 };
        let known = prices.of(&call("work", true, "m"));
        let seen = Usage { output_tokens: 3, ..Usage::default() };
        assert_eq!(known.charged(Used::Counted(seen), most), seen);
        assert_eq!(known.charged(Used::AtLeast(seen), most), known.most(most));
        let more = Usage { output_tokens: 60, ..seen };
        assert_eq!(known.charged(Used::AtLeast(more), most), more, "never less than was seen");
        assert_eq!(Pricing::Unknown.charged(Used::AtLeast(seen), most), seen);
        assert_eq!(Pricing::Free.charged(Used::AtLeast(seen), most), seen);
    }

    #[test]
    fn cost_adds_up_all_kinds_of_tokens() {
        let price = price(None, "*", 4_000_000);
        let usage = Usage {
            input_tokens: 1,
            output_tokens: 2,
            cache_read_tokens: 10,
            cache_write_tokens: 3,
        };
        assert_eq!(price.cost(usage).micros(), 4 + 40 + 4 + 15);
        let one = Usage { cache_read_tokens: 1, ..Usage::default() };
        assert_eq!(price.cost(one).micros(), 1, "fractions are rounded up");
    }

    #[test]
    fn most_is_bounded_by_the_model() {
        let price = price(None, "*", 1_000_000);
        let most = |input, output, responses| price.most(MostTokens { input, output, responses });
        let tokens = |usage: Usage| (usage.cache_write_tokens, usage.output_tokens);
        assert_eq!(tokens(most(Some(10), Some(7), 1)), (10, 7));
        assert_eq!(tokens(most(None, None, 3)), (1000, 300));
        assert_eq!(tokens(most(Some(5000), Some(5000), 1)), (1000, 100));
    }

    proptest! {
        #[test]
        fn reserved_cost_covers_every_use_within_the_bounds(
            input in 0u64..300, output in 0u64..100, cached in 0u64..300, written in 0u64..300,
            responses in 1u64..4,
        ) {
            let price = price(None, "*", 3_000_001);
            let most =
                MostTokens { input: Some(input + cached + written), output: Some(output), responses };
            let used = Usage {
                input_tokens: input,
                output_tokens: output * responses,
                cache_read_tokens: cached,
                cache_write_tokens: written,
            };
            prop_assert!(price.cost(used) <= price.cost(price.most(most)));
        }

        #[test]
        fn cost_never_overflows(tokens in any::<u64>(), micros in any::<u64>()) {
            let all = Usage {
                input_tokens: tokens,
                output_tokens: tokens,
                cache_read_tokens: tokens,
                cache_write_tokens: tokens,
            };
            let input = Money::from_micros(micros).micros() / 10;
            prop_assert!(price(None, "*", input).cost(all) <= Money::MAX);
        }
    }
}
