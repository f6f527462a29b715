"""Environments that judge what the policy called: one step, one document, and a task of several steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..cases import AcceptanceCase, RowPin
from ..scripted_turn import ScriptedToolCall, ScriptedTurn


def tool_cases() -> tuple[AcceptanceCase, ...]:
    """Three environments, accepted and rejected."""
    return (*_single_step(), *_structured_outputs(), *_workplace())


def _calling(name: str, arguments: Mapping[str, Any], **more: Any) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedToolCall(name, arguments),), **more)


def _single_step() -> tuple[AcceptanceCase, AcceptanceCase]:
    environment = "single_step_tool_use_with_argument_comparison"

    def case(verdict: str, section: str, reward: float, category: str) -> AcceptanceCase:
        return AcceptanceCase(
            name=f"{environment}/{verdict}",
            environment=environment,
            config_path=f"resources_servers/{environment}/configs/{environment}.yaml",
            agent=f"{environment}_agent",
            row=RowPin(
                f"resources_servers/{environment}/data/example.jsonl",
                4,
                "2e24731dfeda02e16351dd5abd5c1e3fd8307554f4824cf4fb3630672c63f5ca",
            ),
            turns=(
                _calling(
                    "check_seat_availability",
                    {"event_id": "SHOW24", "section": section},
                    reasoning_content="They want another section: see what is free there.",
                ),
            ),
            reward=reward,
            answer={"category": category, "expected_action.name": "check_seat_availability"},
        )

    return (
        case("accepted", "Medical Zone", 1.0, "A tool call that matches the expected tool call was found"),
        case(
            "rejected",
            "Orchestra",
            0.0,
            "An argument value in a tool call is different than the expected value",
        ),
    )


# What the row's document says about a village, in the form of the row's schema.
_VILLAGE: Mapping[str, Any] = {
    "name": "Dizer Kola",
    "native_name": "ديزركلا",
    "romanized_name": "Dīzer Kolā",
    "settlement_type": "village",
    "country": "Iran",
    "province": "Mazandaran",
    "county": "Nowshahr",
    "bakhsh": "Central",
    "rural_district": "Baladeh Kojur",
    "coordinates": {"latitude": 36.55694, "longitude": 51.79389},
    "population_total": 250,
    "population_year": 2006,
    "number_of_families": 64,
    "timezone_standard": "UTC+3:30 (IRST)",
    "timezone_dst": "UTC+4:30 (IRDT)",
}


def _structured_outputs() -> tuple[AcceptanceCase, AcceptanceCase]:
    def case(verdict: str, extraction: Mapping[str, Any], reward: float, **expected: Any) -> AcceptanceCase:
        return AcceptanceCase(
            name=f"structured_outputs/{verdict}",
            environment="structured_outputs",
            config_path="resources_servers/structured_outputs/configs/structured_outputs_v4.yaml",
            agent="structured_outputs_v4_simple_agent",
            row=RowPin(
                "resources_servers/structured_outputs/data/structured_outputs_v4_example.jsonl",
                0,
                "138b2f4383ec722989fdefd60ea0f1724712037e46e9d62ca2df0cc14308e1a4",
            ),
            turns=(_calling("response_tool_8", {"extraction": dict(extraction)}),),
            reward=reward,
            answer={"tool_name": "response_tool_8", "tool_payload_key": "extraction", **expected},
            absent=() if expected else ("error_type", "error_message"),
        )

    return (
        case("accepted", _VILLAGE, 1.0),
        case(
            "rejected",
            {**_VILLAGE, "population_total": "250"},
            0.0,
            error_type="validation_error",
            error_message="ValidationError: '250' is not of type 'integer'\n\n"
            "Failed validating 'type' in schema['properties']['population_total']:\n"
            "    {'type': 'integer'}\n\n"
            "On instance['population_total']:\n"
            "    '250'",
        ),
    )


def _workplace() -> tuple[AcceptanceCase, AcceptanceCase]:
    search = _calling(
        "calendar_search_events",
        {"time_min": "2023-12-01 00:00:00", "time_max": "2023-12-01 23:59:59", "page_size": 2},
        reasoning_content="See what is on that day.",
    )
    # The second one is not the last event of the day.
    found = (
        '{"output":{"events":['
        '{"event_id":"00000252","event_name":"brainstorming session",'
        '"participant_email":"aisha.chen@atlas.com","event_start":"2023-12-01 15:00:00","duration":"120"},'
        '{"event_id":"00000261","event_name":"performance evaluation",'
        '"participant_email":"amir.ali@atlas.com","event_start":"2023-12-01 14:30:00","duration":"30"}],'
        '"pagination":{"total_events":6,"page":1,"page_size":2,"total_pages":3}}}'
    )

    def case(verdict: str, event: str, reward: float) -> AcceptanceCase:
        rename = _calling(
            "calendar_update_event",
            {"event_id": event, "field": "event_name", "new_value": "Risk Management Forum"},
        )
        return AcceptanceCase(
            name=f"workplace_assistant/{verdict}",
            environment="workplace_assistant",
            config_path="resources_servers/workplace_assistant/configs/workplace_assistant.yaml",
            agent="workplace_assistant_simple_agent",
            row=RowPin(
                "resources_servers/workplace_assistant/data/example.jsonl",
                1,
                "6f556292901caaf89d23e8da5138def04ee77443494b008ade47bd184eeee10c",
            ),
            turns=(search, rename, ScriptedTurn(content="The event has its new name.")),
            reward=reward,
            tool_outputs=((found,), ('{"output":"Event updated successfully."}',), ()),
        )

    return case("accepted", "00000252", 1.0), case("rejected", "00000261", 0.0)
