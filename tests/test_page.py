"""The report in a browser: tables sort, both themes are readable, nothing is fetched, nothing complains."""

import shutil
from pathlib import Path

import pytest
from madeup import plain_page, results, run
from test_compare import sweep

from vitpos import compare

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install vitpos[dev])")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    few = sweep(("none", "ape1d", "rope_axial"), (0, 1))
    found = results(*(member.run for member in few), run("sincos2d", "uniform"))
    found["comparison"] = compare.comparison(few)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(plain_page(found))
    return path


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser, path: Path, **options):
    """The page, and what it has asked for and complained of."""
    page, heard = browser.new_context(**options).new_page(), []
    page.on("request", lambda request: heard.append(request.url))
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(path.as_uri())
    return page, heard


def column(page, index, table=0):
    """The first line of each cell of a column."""
    rows = page.locator("table").nth(table).locator("tbody tr").all()
    return [row.locator("th, td").nth(index).inner_text().split("\n")[0].strip() for row in rows]


def test_tables_sort_down_up_and_back(browser, page_file):
    page, heard = opened(browser, page_file)
    assert page.locator("thead th").count() == page.locator("thead button").count() > 10
    before = column(page, 3)
    assert len(before) == 3
    head = page.locator("table").first.locator("thead th").nth(3)
    numbers = sorted(map(float, before))
    for state, expected in (("descending", numbers[::-1]), ("ascending", numbers), (None, list(map(float, before)))):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == state
        assert list(map(float, column(page, 3))) == expected
    name = page.locator("table").first.locator("thead th button").first
    name.focus()
    page.keyboard.press("Enter")  # and without a mouse
    assert column(page, 0) == ["rope_axial", "none", "ape1d"]
    shifted = column(page, 4, table=1)
    assert "Δ" not in "".join(shifted)
    assert heard == [page_file.as_uri()]


def test_missing_numbers_stay_last(browser, page_file):
    page, _ = opened(browser, page_file)
    table = page.locator("table").filter(has_text="vs reference, if right")
    cell = table.locator("tbody tr").first.locator("td").nth(3)
    cell.evaluate("cell => cell.textContent = '–'")
    page.get_by_text("All shifts", exact=True).click()
    button = table.locator("thead th").nth(4).locator("button")
    for _ in range(2):
        button.click()
        values = [row.locator("th, td").nth(4).inner_text() for row in table.locator("tbody tr").all()]
        assert values[-1] == "–"
        assert len(values) > 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_readable(browser, page_file, theme):
    page, heard = opened(browser, page_file, color_scheme=theme)
    ratio = """([front, back]) => {
        const light = color => {
            const parts = color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
                .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    }"""
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 384) == (theme == "light")
    for selector in ("h1", "td b", "td small", "caption", ".legend li", "dd"):
        ink = page.locator(selector).first.evaluate("e => getComputedStyle(e).color")
        assert page.evaluate(ratio, [ink, paper]) > 4.5, selector  # WCAG AA
    assert page.evaluate(ratio, ["rgb(120, 120, 120)", "rgb(140, 140, 140)"]) < 4.5  # the check can fail
    assert heard == [page_file.as_uri()]


def test_everything_is_there_without_script(browser, page_file):
    page, heard = opened(browser, page_file, java_script_enabled=False)
    assert page.locator("thead button").count() == 0
    assert "over seeds" in page.locator("h2").first.inner_text()
    assert heard == [page_file.as_uri()]


def test_the_check_hears_a_request_and_an_error(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='missing.png'><script>undefinedName()</script>")
    _, heard = opened(browser, bad)
    assert any("missing.png" in line for line in heard)
    assert any("undefinedName" in line for line in heard)


def test_phones_show_the_table_without_scrolling_the_page(browser, page_file):
    page, _ = opened(browser, page_file, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("td[data-label='home']").first.is_visible()


def test_phones_sort_by_a_menu_and_see_that_a_table_goes_on(browser, page_file):
    page, heard = opened(browser, page_file, viewport={"width": 390, "height": 800})
    names = column(page, 0)
    menu = page.locator("select").first
    menu.select_option("encoding")
    assert column(page, 0) == sorted(names) != names
    menu.select_option("home")
    homes = list(map(float, column(page, 1)))
    assert homes == sorted(homes, reverse=True)
    menu.select_option("as listed")
    assert column(page, 0) == names
    page.get_by_text("All shifts", exact=True).click()
    box = page.locator(".scroll").filter(has=page.get_by_text("vs reference, if right"))
    page.wait_for_function("box => box.classList.contains('more')", arg=box.element_handle())  # a fold opens later
    box.evaluate("box => { box.scrollLeft = box.scrollWidth }")
    page.wait_for_function("box => !box.classList.contains('more')", arg=box.element_handle())
    wide, _ = opened(browser, page_file, viewport={"width": 1280, "height": 800})
    assert not wide.locator("select").first.is_visible()
    assert wide.locator(".scroll.more").count() == 0
    assert heard == [page_file.as_uri()]


def test_menus_of_folded_tables_have_names(browser, tmp_path):
    few = sweep(("none", "ape1d"), (0, 1))
    found = results(*(member.run for member in few)) | {"comparison": compare.comparison(few)}
    path = tmp_path / "report.html"
    path.write_text(plain_page(found))
    page, _ = opened(browser, path, viewport={"width": 390, "height": 800})
    shown, folded = page.locator("select").all()
    assert not folded.is_visible()
    assert folded.locator("option").all_text_contents() == shown.locator("option").all_text_contents()
    assert "home" in folded.locator("option").all_text_contents()


def test_what_a_link_leads_to_opens(browser, page_file):
    page, _ = opened(browser, page_file)
    table = page.locator("table").filter(has_text="vs reference, if right")
    assert not table.is_visible()
    page.get_by_role("link", name="all shifts").first.click()
    assert table.is_visible()


@pytest.mark.parametrize("join", [", ", "_"])
def test_long_names_leave_room_for_numbers(browser, tmp_path, join):
    """Of architectures, weights or recipes, which tell rows of one encoding apart."""
    path, words = tmp_path / "report.html", join.join(f"word{i}" for i in range(40))
    path.write_text(plain_page(results(*(run("ape1d") | {"architecture": words + end} for end in "ab"))))
    page, _ = opened(browser, path, viewport={"width": 1280, "height": 800})
    row = page.locator("table").first.locator("tbody tr").first
    assert "word39a" in row.inner_text()
    last = row.locator("td").last.bounding_box()
    assert last["x"] + last["width"] < 1280
    assert row.locator("small").first.evaluate("name => name.scrollWidth <= name.clientWidth")  # nor lies over them
